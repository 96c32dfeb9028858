"""What the attention kernels of decoding have in common: tiling, tolerance, inputs, and the rows'
own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import MAX_POSITIONS, Rotation, frequencies, turns_table
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.target import Target

WARPS = 8
#: Query heads that share one read of K and V. Eight take more registers than two CTAs an SM have.
MAX_TILE = 4
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

    A lane group owns a key, a lane eight of its dims; a CTA takes some of the query heads that
    share a KV head, at most ``most_heads`` (a power of two up to `MAX_TILE`): fewer make more CTAs,
    each of which reads K and V. The result is the same, bit for bit.

    With a ``rope``, k and v (rows, kv_heads, head_dim) of the rows' own tokens are inputs. q and k
    are turned as by Rope, k and v are written to the caches as by KvAppend; neither q nor k is
    written back. The output is the same as theirs, bit for bit. Rows must then be of different
    sequences, which share no page that a row writes to. Older tokens, the block table, sequence and
    position are read before ``griddepcontrol.wait``: earlier launches of the same graph may write
    them only if a plain edge in between makes sure that they are complete.
    """

    rope: Rotation | None = None
    most_heads: int = MAX_TILE

    #: Whether a CTA takes a chunk of a row's keys, which may be without the row's own token.
    splits_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim > 32 * LANE_DIMS:
            raise PtxgenError(f"attention takes head_dim up to {32 * LANE_DIMS}: {self.head_dim}")
        if self.most_heads not in (1, 2, MAX_TILE):
            raise PtxgenError(f"most_heads {self.most_heads}: 1, 2 or {MAX_TILE}")
        if self.rope and self.rope.rotary_dim > self.head_dim:
            raise PtxgenError(f"rotary_dim {self.rope.rotary_dim} of a head_dim of {self.head_dim}")
        if self.rope and self.layout.max_len > MAX_POSITIONS:
            raise PtxgenError(f"RoPE positions are exact below 2^24: max_len {self.layout.max_len}")

    @property
    def keys(self) -> int:
        """Rows attend if their position is below this; from ``max_len`` on they are idle."""
        return self.layout.max_len

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, where the rows are; with a rope also their own token."""
        if self.rope is None:
            return super().input_params
        token = ("rows", self.layout.kv_heads, "head_dim")
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            Param("k", "f32", token, Access.IN),
            Param("v", "f32", token, Access.IN),
            Param("frequencies", "f32", (self.rope.pairs, 2), Access.IN),
            # A token of a cache is written, the others must survive: INOUT, not OUT.
            *self.layout.params(Access.INOUT),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def lanes(self) -> int:
        """Lanes that share a key: head_dim / 8, rounded up to a power of two (the rest idle)."""
        return 1 << (self.head_dim // LANE_DIMS - 1).bit_length()

    @property
    def tile(self) -> int:
        """Query heads of one CTA, a power of two (the last tile of a KV head may have fewer)."""
        return min(self.most_heads, self.lanes, 1 << (self.group - 1).bit_length())

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.group, self.tile)

    @property
    def keys_per_pass(self) -> int:
        """Keys a CTA takes at once, one a lane group."""
        return WARPS * (32 // self.lanes)

    def cta(self, target: Target) -> DecodeCta:
        """What the template needs to know about a CTA on ``target``."""
        return DecodeCta(self, target)

    @property
    def token_nbytes(self) -> int:
        """Dynamic shared memory: a row's own key and value in raw registers of eight values, 16 or
        32 bytes; nothing without a rope."""
        if self.rope is None:
            return 0
        return 2 * self.head_dim // LANE_DIMS * (32 if self.layout.dtype == "f32" else 16)

    @property
    def rtol(self) -> float:
        """Allowed deviation, relative to the largest output.

        The inputs are the cache's own values: what remains is f32 arithmetic and ex2.approx
        (2^-22 relative). A soft-cap adds the error of tanh (4e-7) times the cap. A rope adds the
        error of sines (2^-20.5), in every term of a score.
        """
        turned = 3e-5 * max(1.0, self.rope.magnitude) ** 2 if self.rope else 0.0
        return 5e-6 + 4e-7 * self.softcap + turned

    def appended(self, inputs: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Inputs after the rows' own tokens are turned and in the caches, and these caches; without
        a rope the inputs as they are, and nothing."""
        if self.rope is None:
            return inputs, {}
        layout, table = self.layout, inputs.get("block_table")
        caches = {name: inputs[name].copy() for name in ("k_cache", "v_cache")}
        q = inputs["q"].copy()
        for row in np.flatnonzero(inputs["position"] < self.keys):
            sequence, position = (int(inputs[name][row]) for name in ("sequence", "position"))
            q[row], k = (
                self.rope.turn(inputs[name][None, row], [position], inputs["frequencies"])[0]
                for name in ("q", "k")
            )
            for name, token in (("k_cache", k), ("v_cache", inputs["v"][row])):
                layout.write(caches[name], sequence, [position], token[:, None], table)
        return inputs | {"q": q} | caches, caches

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """See AttentionSpec. With a rope, the caches hold what is older than the rows, and a table
        made here shares no page.

        Keys are chosen so that the cache holds them exactly once they are turned: the error of a
        sine then does not decide how they are rounded.
        """
        if self.rope is None:
            return super().inputs_at(rng, positions, sequences, block_table)
        layout = self.layout
        if layout.is_paged and block_table is None:
            pages = rng.permutation(layout.pages)[: layout.sequences * layout.blocks]
            block_table = pages.astype(np.uint32).reshape(layout.sequences, layout.blocks)
        inputs = super().inputs_at(rng, positions, sequences, block_table)
        inputs["frequencies"] = turns_table(frequencies(self.rope.rotary_dim, 10000.0)[0])
        lengths = [0] * layout.sequences
        for sequence, position in zip(sequences, positions, strict=True):
            if position < layout.max_len:
                lengths[sequence] = position
        for name in ("k_cache", "v_cache"):
            inputs[name] = layout.random_cache(rng, lengths, block_table, UNREAD_BYTE)
        k, v = rng.standard_normal((2, self.rows, layout.kv_heads, self.head_dim))
        for row, position in enumerate(positions):
            if position < layout.max_len:
                stored = _rounded(layout, k[row])
                k[row] = self.rope.turn(stored[None], [position], inputs["frequencies"], sign=-1)[0]
            else:
                k[row] = v[row] = np.nan
        return inputs | {"k": k.astype(np.float32), "v": v.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places of the sequences, of several one idle; one head is steep."""
        max_len = self.layout.max_len
        positions = [int(p) for p in rng.integers(0, max_len, self.rows)]
        positions[0] = min(max_len - 1, positions[0] + max_len // 2)
        if self.rows > 1:
            positions[-1] = max_len + int(rng.integers(0, 2)) * 1000
        sequences = [r % self.layout.sequences for r in range(self.rows)]
        inputs = self.inputs_at(rng, positions, sequences)
        inputs["q"][:, -1] *= STEEP
        return inputs

    def flops(self) -> int:
        """At full length: two products and about eight operations of softmax a key."""
        return self.rows * self.heads * self._longest * (4 * self.head_dim + 8)

    @property
    def _longest(self) -> int:
        """Most keys a row attends to."""
        return min(self.window or self.layout.max_len, self.layout.max_len)

    def _kv_bytes(self) -> int:
        """K and V that all rows read at full length, each KV head once."""
        return 2 * self.rows * self._longest * self.layout.token_nbytes


def _rounded(layout: KvLayout, token: Array) -> Array:
    """A token (kv_heads, head_dim) as a cache returns it."""
    single = KvLayout(1, layout.kv_heads, 1, layout.head_dim, layout.dtype)
    cache = single.empty()
    single.write(cache, 0, [0], token[:, None])
    return single.read(cache, 0, [0])[:, 0]


class DecodeCta:
    """How the threads of a CTA divide keys and dims, and what lies where in shared memory.

    Where the CTA is ``asynchronous``, keys and values pass through a ring of ``stages`` stages,
    one for each step of the loop over the keys; after the loop the warps' sums take its place. A
    q8_0 scale is copied with its neighbour in an aligned word, which must be of the same slot.
    Sizes and offsets (``..._at``) are in bytes.
    """

    def __init__(self, spec: DecodeAttention, target: Target) -> None:
        layout, threads = spec.layout, spec.launch_shape.threads
        self.spec, self.target, self.layout = spec, target, layout
        self.head_dim, self.threads, self.warps = layout.head_dim, threads, threads // 32
        # query heads of the CTA; lanes that share a key; those of them that have eight of its dims
        self.tile, self.lanes, self.eights = spec.tile, spec.lanes, layout.head_dim // 8
        self.has_idle_lanes = self.lanes != self.eights
        # registers of eight elements as they lie in a cache
        self.raw = layout.raw_words
        self.quantised = layout.dtype == "q8_0"
        self.asynchronous = target.sm >= 80 and not (self.quantised and self.head_dim % 64)
        # keys a step: of a lane, of the CTA
        self.ahead = 1 if self.asynchronous and layout.dtype == "f32" else 2
        self.step = self.ahead * spec.keys_per_pass

        # the ring: a thread's part of the first copy of a key or value, the distance to its second
        # one, a key or value of all threads
        self.stages = 3
        self.thread_bytes = 8 if self.quantised else 16
        self.second_part = self.thread_bytes * threads
        self.piece_bytes = (32 if layout.dtype == "f32" else 16) * threads
        self.stage_bytes = 2 * self.ahead * self.piece_bytes
        self.ring_bytes = self.stages * self.stage_bytes
        # the warps' maxima and sums, then their weighted values
        self.values_at = 8 * self.warps * self.tile
        merged = self.values_at + 4 * self.warps * self.tile * self.head_dim
        self.scratch_bytes = max(self.ring_bytes, merged) if self.asynchronous else merged

        # the row's own token, if the spec has a rope: pairs of a head that turn and other values
        self.pairs = spec.rope.pairs if spec.rope else 0
        self.rest = self.head_dim - 2 * self.pairs
        # pairs of a thread, in the queries and the key
        self.turn_rounds = ceil_div((self.tile + 1) * self.pairs, threads)
        self.copy_rounds = ceil_div((self.tile + 1) * self.rest, threads)
        self.rounds = self.turn_rounds + self.copy_rounds
        # the last stage of the ring is not filled before all threads have taken what they need
        self.turned_at = self.ring_bytes - self.stage_bytes if self.asynchronous else 0
        # a key or a value as the cache holds it, and eight dims of it
        self.token_bytes = spec.token_nbytes // 2
        self.eight_bytes = self.token_bytes // self.eights
