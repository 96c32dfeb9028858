"""What the attention kernels of decoding have in common: tiling, tolerance, inputs, and the rows'
own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.decode_cta import MAX_STATIC_SHARED, TILE_KEYS, DecodeCta
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import MAX_POSITIONS, Rotation, frequencies, turns_table
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.target import Target

WARPS = 8
#: Query heads that share one read of K and V. Eight take more registers than two CTAs an SM have.
MAX_TILE = 4
#: Values of a head whose sums registers hold on tensor cores, and of a head of q8_0, whose scales
#: take some as well.
MAX_MMA_VALUES, MAX_QUANTS_DIM = 512, 256
#: Values of a head that one lane owns: 16 bytes of f16.
LANE_DIMS = 8
#: Factor on the queries of one head of random inputs: its scores spread so far that the running
#: maximum has to be updated and sums rescaled.
STEEP = 4
#: Bytes of the caches of inputs where nothing should be read: 2 or 3 in every float type.
UNREAD_BYTE = 0x40


@dataclass(frozen=True)
class DecodeAttention(AttentionSpec):
    """Attention of rows that need not have a sequence in common; see AttentionSpec.

    A CTA takes some of the query heads that share a KV head, at most ``most_heads`` (a power of two
    up to `MAX_TILE`): fewer make more CTAs, each of which reads K and V. A head's result does not
    depend on those beside it in a CTA; but a single one of a single row is multiplied otherwise.

    From sm_80 on tensor cores multiply where `suits_tensor_cores`, with weights as the sum of two
    16-bit floats and queries as well; but with q8_0 queries are, of each 32 dims, the sum of two
    8-bit integers times scales. Scaled queries of an f16 cache become infinite from 65,536 on, and
    an infinity in a key makes NaN. Elsewhere a lane group owns a key, a lane eight of
    its dims (twice eight beyond 256 dims).

    With a ``token``, q is as the products leave it: the kernel prepares it as PrepareTokens does.
    Where the token appends, k (rows, kv_heads, head_dim) and v (rows, kv_heads, value_dim) of the
    rows' own tokens are inputs, too, without v where it is the end of k, which then stays as it
    is; with its ``latent_norm`` their parts are. They are prepared and written to the caches as by
    it; neither q nor k is written back. The output is the same as theirs, bit for bit. Rows must
    then be of different sequences, which share no page that a row writes to. Older tokens, the
    block table, sequence, position, frequencies and weights are read before
    ``griddepcontrol.wait``: earlier launches of the same graph may write them only if a plain edge
    in between makes sure that they are complete.
    """

    token: OwnToken | None = None
    most_heads: int = MAX_TILE

    #: Whether a CTA takes a chunk of a row's keys, which may be without the row's own token.
    splits_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_heads not in (1, 2, MAX_TILE):
            raise PtxgenError(f"most_heads {self.most_heads}: 1, 2 or {MAX_TILE}")
        if self.rope and self.rope.rotary_dim > self.head_dim:
            raise PtxgenError(f"rotary_dim {self.rope.rotary_dim} of a head_dim of {self.head_dim}")
        if self.appends and self.layout.values_in_keys and not self._values_stay:
            raise PtxgenError("values that are the end of keys are neither normed nor rotated")
        if self.is_latent and not (self.layout.values_in_keys and self.layout.kv_heads == 1):
            raise PtxgenError("a latent vector is the value in the key of a single KV head")
        if (self.rope or self.scores.max_bias) and self.layout.max_len > MAX_POSITIONS:
            raise PtxgenError(f"RoPE positions are exact below 2^24: max_len {self.layout.max_len}")

    @property
    def rope(self) -> Rotation | None:
        """How queries (and the rows' own keys) are rotated."""
        return self.token.rope if self.token else None

    @property
    def appends(self) -> bool:
        """Whether the rows' own tokens are appended."""
        return self.token is not None and self.token.appends

    @property
    def is_latent(self) -> bool:
        """Whether the rows' own heads come in the two parts of latent attention."""
        return self.token is not None and self.token.latent_norm is not None

    @property
    def rotated_dim(self) -> int:
        """Values of a key before those that are the value: the first part of two."""
        return self.layout.value_start

    @property
    def _values_stay(self) -> bool:
        """Whether nothing happens to the end of keys that are values."""
        token, turned = self.token, self.rope.rotary_dim if self.rope else 0
        is_normed = token is not None and (token.qk_norm or token.v_norm)
        return not is_normed and turned <= self.layout.value_start

    @property
    def keys(self) -> int:
        """Rows attend if their position is below this; from ``max_len`` on they are idle."""
        return self.layout.max_len

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, where the rows are; with a token also what it takes."""
        if self.token is None:
            return super().input_params
        return (
            *self._own_params,
            *self.token.constant_params(self.heads, self.layout.kv_heads),
            # A token of a cache is written, the others must survive: INOUT, not OUT.
            *self.layout.params(Access.INOUT if self.appends else Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def _own_params(self) -> tuple[Param, ...]:
        """The rows' own queries and, where they are appended, keys and values."""
        if not self.is_latent:
            q = Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN)
            return (q, *(self.layout.token_params if self.appends else ()))
        return (
            Param("q_rotated", "f32", ("rows", "heads", "rotated_dim"), Access.IN),
            Param("q_absorbed", "f32", ("rows", "heads", "value_dim"), Access.IN),
            Param("k_rotated", "f32", ("rows", "rotated_dim"), Access.IN),
            Param("latent", "f32", ("rows", "value_dim"), Access.IN),
        )

    @property
    def lanes(self) -> int:
        """Lanes that share a key: head_dim / 8 (or value_dim / 8, if that is more), rounded up to a
        power of two (the rest idle); at most a warp."""
        eights = max(self.head_dim, self.value_dim) // LANE_DIMS
        return min(32, 1 << (eights - 1).bit_length())

    @property
    def pieces(self) -> tuple[int, int]:
        """How often a lane has eight dims of a key, and of a value: eights lane, lane + 32, ..."""
        first, second = (
            ceil_div(dims // LANE_DIMS, self.lanes) for dims in (self.head_dim, self.value_dim)
        )
        return first, second

    @property
    def tile(self) -> int:
        """Query heads of one CTA, a power of two (the last tile of a KV head may have fewer)."""
        fit = MAX_TILE // max(self.pieces)
        if self.suits_tensor_cores:
            fit = min(MAX_TILE, self.sums_room // (4 * WARPS * (self.value_dim + 2)))
        most = min(self.most_heads, 1 << (fit.bit_length() - 1), self.lanes)
        return min(most, 1 << (self.group - 1).bit_length())

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.group, self.tile)

    @property
    def keys_per_pass(self) -> int:
        """Keys a CTA takes at once, one a lane group."""
        return WARPS * (32 // self.lanes)

    @property
    def suits_tensor_cores(self) -> bool:
        """Whether tensor cores multiply from sm_80 on: 16-bit operands, sums that registers hold,
        a ring no shorter than a tile of keys; two scales of q8_0 are copied at once, and must be of
        the same slot.

        A single head of one row is less work for lanes, unless it is quantised. On an H200 256 keys
        (32 heads, 8 KV heads of 128 values, f16) take 3.6 us so, on tensor cores 3.8; eight rows of
        them (16 heads, 8 KV heads of 256 values) 13.8 and 7.7.
        """
        widths, dtype = (self.head_dim, self.value_dim), self.layout.dtype
        if 0 < self.layout.capacity < TILE_KEYS:
            return False
        if dtype == "q8_0":
            return max(widths) <= MAX_QUANTS_DIM and not any(width % 64 for width in widths)
        is_single = self.rows == 1 and min(self.most_heads, self.lanes, self.group) == 1
        return self.value_dim <= MAX_MMA_VALUES and dtype != "f32" and not is_single

    @property
    def tensor_cores_since(self) -> int:
        """The first architecture on which they do: before sm_90 the sums of more than 256 values do
        not fit beside what the assembler keeps."""
        return 90 if self.value_dim > 256 else 80

    @property
    def ring_nbytes(self) -> int:
        """Dynamic shared memory, from ``ring_at`` on, for keys and values on their way to tensor
        cores; 0 where the CTA declares it."""
        return 0

    @property
    def sums_room(self) -> int:
        """Shared memory for the sums of all warps, after the keys."""
        return MAX_STATIC_SHARED

    @property
    def ring_at(self) -> int:
        """Where that begins."""
        return 0

    @property
    def queries_at(self) -> int:
        """Dynamic shared memory: where the queries lie as fragments, after the row's own token."""
        return self.token_nbytes

    @property
    def queries_nbytes(self) -> int:
        """Their size: 16 bytes a lane for 32 dims."""
        return 512 * ceil_div(self.head_dim, 32) if self.suits_tensor_cores else 0

    def resident_on(self, target: Target) -> int:
        """Two CTAs where heads are wide and tensor cores multiply: the assembler would take more
        registers. Not with q8_0's scales, or before sm_90: some would not fit; nor with the sums of
        more than 256 values."""
        is_wide = max(self.head_dim, self.value_dim) > 128 and self.value_dim <= 256
        fits = target.sm >= 90 and self.layout.dtype != "q8_0"
        return 2 if is_wide and fits and self.suits_tensor_cores else 0

    def cta(self, target: Target) -> DecodeCta:
        """What the template needs to know about a CTA on ``target``."""
        return DecodeCta(self, target)

    @property
    def token_nbytes(self) -> int:
        """Dynamic shared memory: a row's own key and value in raw registers of eight values, 16 or
        32 bytes; nothing where it is not appended."""
        if not self.appends:
            return 0
        eights = (self.head_dim + self.value_dim) // LANE_DIMS
        return eights * (32 if self.layout.dtype == "f32" else 16)

    @property
    def rtol(self) -> float:
        """Allowed deviation, relative to the largest output.

        The inputs are the cache's own values: what remains is f32 arithmetic and ex2.approx
        (2^-22 relative). On tensor cores queries and weights are the sum of two f16 (2^-22) or two
        bf16 (2^-16); values of q8_0 are rounded to f16, with queries to 2^-16 of the largest of 32
        dims. A soft-cap adds the error of tanh (4e-7)
        times the cap. A rope adds the error of sines (2^-20.5), in every term of a score; a norm or
        a temperature that of its factor (2^-22), ALiBi that of its slope, times the distance of
        keys that still count.
        """
        turned = 3e-5 * max(1.0, self.rope.magnitude) ** 2 if self.rope else 0.0
        factor = 1e-5 if self.token and (self.token.qk_norm or self.token.temperature) else 0.0
        slope = 1e-5 if self.scores.max_bias else 0.0
        parts = {"bf16": 4 * 2.0**-16, "q8_0": 2.0**-11}.get(self.layout.dtype, 0.0)
        cap = 4e-7 * self.scores.softcap
        return 5e-6 + cap + turned + factor + slope + (parts if self.suits_tensor_cores else 0.0)

    def appended(self, inputs: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Inputs after the rows' own tokens are prepared and in the caches, and these caches;
        without a token the inputs as they are, and nothing."""
        if self.token is None:
            return inputs, {}
        if self.is_latent:
            inputs = inputs | self._joined(inputs)
        names = [name[0] for name in self.layout.caches if self.appends]
        caches = {f"{name}_cache": inputs[f"{name}_cache"].copy() for name in names}
        q = inputs["q"].copy()
        for row in np.flatnonzero(inputs["position"] < self.keys):
            sequence, position = (int(inputs[name][row]) for name in ("sequence", "position"))
            prepared = {
                name: self.token.prepared(name, inputs[name][None, row], [position], inputs)[0]
                for name in ("q", *names)
            }
            q[row] = prepared["q"]
            for name in names:
                cache, layout = caches[f"{name}_cache"], self.layout.caches[f"{name}_cache"]
                values = prepared[name][:, None]
                layout.write(cache, sequence, [position], values, inputs.get("block_table"))
        return inputs | {"q": q} | caches, caches

    def _joined(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """q and k of their parts, in float64."""
        assert self.token is not None
        assert self.token.latent_norm is not None
        value = self.token.latent_norm(inputs["latent"], inputs["latent_norm"])
        k = np.concatenate([inputs["k_rotated"], value], axis=1)
        q = np.concatenate([inputs["q_rotated"], inputs["q_absorbed"]], axis=2)
        return {"q": q, "k": k[:, None]}

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """See AttentionSpec. With a token that is appended, the caches hold what is older than the
        rows, and a table made here shares no page.

        Keys and values are chosen so that the cache holds them exactly once they are prepared: the
        error of a sine then does not decide how they are rounded.
        """
        if self.token is None:
            return super().inputs_at(rng, positions, sequences, block_table)
        layout = self.layout
        if layout.is_paged and block_table is None:
            pages = rng.permutation(layout.pages)[: layout.sequences * layout.blocks]
            block_table = pages.astype(np.uint32).reshape(layout.sequences, layout.blocks)
        inputs = super().inputs_at(rng, positions, sequences, block_table)
        if self.rope:
            inputs["frequencies"] = turns_table(frequencies(self.rope.rotary_dim, 10000.0)[0])
        for name in (*self.token.weights, *(("latent_norm",) if self.is_latent else ())):
            shape = self.shape_of(self.param(name))
            inputs[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        if not self.appends:
            return inputs
        lengths = [0] * layout.sequences
        for sequence, position in zip(sequences, positions, strict=True):
            if position < layout.max_len:
                lengths[sequence] = position
        for name, cache in layout.caches.items():
            inputs[name] = cache.random_cache(rng, lengths, block_table, UNREAD_BYTE)
        for param, cache in zip(layout.token_params, layout.caches.values(), strict=True):
            own = rng.standard_normal((self.rows, cache.kv_heads, cache.head_dim))
            for row, position in enumerate(positions):
                stored = cache.rounded(own[row])
                own[row] = np.nan
                if position < layout.max_len:
                    own[row] = self.token.origin_of(param.name, stored, position, inputs)
            inputs[param.name] = own.astype(np.float32)
        return self._in_parts(inputs) if self.is_latent else inputs

    def _in_parts(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same with the parts of q and k."""
        at = self.rotated_dim
        q, k = (inputs.pop(name) for name in "qk")
        parts = {"q_rotated": q[..., :at], "q_absorbed": q[..., at:]}
        parts |= {"k_rotated": k[:, 0, :at], "latent": k[:, 0, at:]}
        return inputs | {name: np.ascontiguousarray(part) for name, part in parts.items()}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places of the sequences, of several one idle; one head is steep."""
        max_len = self.layout.max_len
        positions = [int(p) for p in rng.integers(0, max_len, self.rows)]
        positions[0] = min(max_len - 1, positions[0] + max_len // 2)
        if self.rows > 1:
            positions[-1] = max_len + int(rng.integers(0, 2)) * 1000
        sequences = [r % self.layout.sequences for r in range(self.rows)]
        inputs = self.inputs_at(rng, positions, sequences)
        for name in ("q_rotated", "q_absorbed") if self.is_latent else ("q",):
            inputs[name][:, -1] *= STEEP
        return inputs

    def flops(self) -> int:
        """At full length: two products and about eight operations of softmax a key."""
        return self.rows * self.heads * self._longest * (2 * self.head_dim + 2 * self.value_dim + 8)

    @property
    def _longest(self) -> int:
        """Most keys a row attends to."""
        return min(self.scores.span or self.layout.max_len, self.layout.max_len)

    def _kv_bytes(self) -> int:
        """K and V that all rows read at full length, each KV head once."""
        return self.rows * self._longest * self.layout.pair_nbytes
