"""Prepare the new tokens of a step's rows and append them to a layer's KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import PLAIN_TOKEN, OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens_examples import examples_of_tokens
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import MAX_POSITIONS, frequencies, turns_table
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Maximum warps per CTA unless heads are longer, and maximum heads that a thread has a part of.
MAX_WARPS, MAX_ROUNDS = 4, 4
#: A thread has parts of several heads if this many CTAs remain.
ENOUGH_CTAS = 1024


@dataclass(frozen=True)
class PrepareTokens(KernelSpec):
    """Process the rows' queries, keys and values as ``token`` describes: queries in place, keys and
    values into the caches.

    Row r is token ``position[r]`` of sequence ``sequence[r]``. Rounding is the layout's. A position
    from ``max_len`` on marks a padding row, of which nothing is written. Rows must be different
    tokens (in a ring: of different slots), none of them in a shared page.

    Queries are not a parameter if they are not changed; keys and values are not if the token is not
    appended: any heads can then be prepared in place. Values that are the end of keys are not a
    parameter either. Without query ``heads`` only keys and values are prepared. Another kernel
    computes norms over rows.

    Rows of ``texts`` (`Scores.texts`) go to key r each; their positions are those in their texts.
    """

    heads: int
    layout: KvLayout
    rows: int = 1
    token: OwnToken = PLAIN_TOKEN
    texts: bool = False

    name = "prepare_tokens"
    limits = limited(heads=range(1 << 31), rows=GRID_ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        token = self.token
        if token.norms_rows:
            raise PtxgenError("norms over the heads of a row are launches of their own")
        if not (token.appends or self.has_queries):
            raise PtxgenError("tokens that are neither prepared nor appended: nothing to do")
        if self.texts and (self.layout.sequences > 1 or self.rows > self.layout.max_len):
            raise PtxgenError(f"texts of {self.rows} rows have one sequence with room for all")
        if token.rope and token.rope.rotary_dim > self.head_dim:
            raise PtxgenError(f"rotary_dim {token.rope.rotary_dim} of a head of {self.head_dim}")
        if token.rope and self.layout.max_len > MAX_POSITIONS:
            raise PtxgenError(f"RoPE is exact below 2^24: max_len {self.layout.max_len}")

    @property
    def has_queries(self) -> bool:
        """Whether queries are changed."""
        return self.heads > 0 and (self.changes_keys or self.token.temperature is not None)

    @property
    def changes_keys(self) -> bool:
        """Whether keys (and queries) are changed other than by rounding."""
        return self.token.rope is not None or self.token.qk_norm is not None

    @property
    def kv_heads(self) -> int:
        """KV heads of the layout."""
        return self.layout.kv_heads

    @property
    def head_dim(self) -> int:
        """Dimension of query and key heads."""
        return self.layout.head_dim

    @property
    def value_dim(self) -> int:
        """Dimension of V heads."""
        return self.layout.values_per_head

    @property
    def params(self) -> tuple[Param, ...]:
        layout, position = self.layout, Param("position", "u32", ("rows",), Access.IN)
        queries = Param("q", "f32", ("rows", "heads", "head_dim"), Access.INOUT)
        prepared = (queries,) if self.has_queries else ()
        constants = self.token.constant_params(self.heads, self.kv_heads)
        if not self.token.appends:
            return (*prepared, *constants, position)
        return (
            *prepared,
            *layout.token_params,
            # Only a few tokens of a cache are written, others are preserved: INOUT, not OUT.
            *layout.params(Access.INOUT),
            *constants,
            Param("sequence", "u32", ("rows",), Access.IN),
            position,
        )

    # ---- division of work: a CTA has some heads of one row, of "q", "k" or "v" ----

    @property
    def counts(self) -> dict[str, int]:
        """Number of heads by kind, for the existing kinds."""
        queries = {"q": self.heads} if self.has_queries else {}
        stored = (name[0] for name in self.layout.caches if self.token.appends)
        return queries | dict.fromkeys(stored, self.kv_heads)

    def eights(self, name: str) -> int:
        """Groups of eight values per head: one per thread."""
        return (self.value_dim if name == "v" else self.head_dim) // 8

    @property
    def warps(self) -> int:
        """Warps per CTA: at least one head of each kind."""
        longest = max(map(self.eights, self.counts))
        most = max(count * self.eights(name) for name, count in self.counts.items())
        return max(ceil_div(longest, 32), min(MAX_WARPS, ceil_div(most, 32)))

    def slots(self, name: str) -> int:
        """Heads that the threads of a CTA have at once."""
        return 32 * self.warps // self.eights(name)

    def rounds(self, name: str) -> int:
        """Heads that a thread has in sequence: the first one's factors serve all."""
        needed = ceil_div(self.counts[name], self.slots(name))
        return max(1, min(MAX_ROUNDS, needed, self.rows * needed // ENOUGH_CTAS))

    def parts(self, name: str) -> int:
        """CTAs that share the heads of a row."""
        return ceil_div(self.counts[name], self.slots(name) * self.rounds(name))

    def is_ragged(self, name: str) -> bool:
        """Whether some threads have no head in some round."""
        whole = self.slots(name) * self.eights(name) == 32 * self.warps
        return not whole or self.counts[name] % (self.slots(name) * self.rounds(name)) > 0

    def heads_at_once(self, names: Sequence[str]) -> int:
        """Maximum heads of these kinds that a thread has in registers."""
        return max((min(2, self.rounds(n)) for n in names if n in self.counts), default=0)

    @property
    def ragged_rounds(self) -> int:
        """As `heads_at_once`, for kinds of which some threads have none."""
        return self.heads_at_once([name for name in self.counts if self.is_ragged(name)])

    def norm(self, name: str) -> Norm | None:
        """The norm of a kind of heads."""
        return self.token.v_norm if name == "v" else self.token.qk_norm

    @property
    def norms(self) -> int:
        """Slots in shared memory for the factors of norms, per warp."""
        normed = [name for name in self.counts if self.norm(name)]
        return max((self.slots(n) * self.rounds(n) + self.warps for n in normed), default=0)

    @property
    def scaled_heads(self) -> int:
        """Heads of a CTA, at most, that have one scale each."""
        scaled = [
            name
            for name in self.counts
            if name != "q" and self.layout.cache_of(name).format.scales_heads
        ]
        return max((self.slots(name) * self.rounds(name) for name in scaled), default=0)

    @property
    def turns_eights(self) -> bool:
        """Whether a thread's eight values rotate in the same way, with eight others or each
        other."""
        if (rope := self.token.rope) is None:
            return False
        return rope.rotary_dim % (8 if rope.style == "interleaved" else 16) == 0

    @property
    def launch_shape(self) -> LaunchShape:
        parts = sum(map(self.parts, self.counts))
        return LaunchShape(grid=(self.rows, parts, 1), block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # sin.approx and cos.approx: 2^-20.5 absolute (PTX ISA, "sin"); both affect every value. The
        # factors of norm and temperature have smaller errors.
        if not (self.has_queries or self.changes_keys or self.token.v_norm):
            return Tolerance()
        return Tolerance(rtol=2e-6 * max(1.0, self.token.rope.magnitude if self.token.rope else 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        position, layout = inputs["position"], self.layout
        active = np.flatnonzero(position < layout.max_len)
        prepared = {}
        for name in self.counts:
            x = inputs[name][active]
            prepared[name] = self.token.prepared(name, x, position[active], inputs)
        outputs = {}
        if self.has_queries:
            outputs["q"] = inputs["q"].copy()
            outputs["q"][active] = prepared["q"]
        if not self.token.appends:
            return outputs
        for name, cache_layout in layout.caches.items():
            outputs[name] = cache = inputs[name].copy()
            for row, values in zip(active.tolist(), prepared[name[0]], strict=True):
                sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
                at = [row if self.texts else int(position[row])]
                cache_layout.write(cache, sequence, at, values[:, None], table)
        return outputs

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Different tokens of random sequences; with more than two rows, the second is padding."""
        inputs, layout, token = super().make_inputs(rng), self.layout, self.token
        if token.rope:
            inputs["frequencies"] = turns_table(frequencies(token.rope.rotary_dim, 10000.0)[0])
        if layout.is_paged and token.appends:
            inputs["block_table"] = layout.random_table(rng)
        table = inputs.get("block_table")
        inputs |= _different_tokens(self, rng, table)
        if not token.appends:
            return inputs
        for name, cache in layout.caches.items():
            lengths = [min(layout.max_len, 64)] * layout.sequences
            inputs[name] = cache.random_cache(rng, lengths, table, byte=0)
            # values that the cache holds exactly, if they are computed: errors cannot decide a
            # rounding
            heads = name[0]
            if token.v_norm if heads == "v" else self.changes_keys:
                for row, position in enumerate(inputs["position"].tolist()):
                    stored = cache.rounded(inputs[heads][row])
                    inputs[heads][row] = token.origin_of(heads, stored, position, inputs)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, PrepareTokens]:
        return examples_of_tokens(cls)

    def flops(self) -> int:
        token, flops = self.token, 0
        for name, count in self.counts.items():
            dims = count * (self.value_dim if name == "v" else self.head_dim)
            flops += 4 * dims if self.norm(name) else 0
            flops += dims if name == "q" and token.temperature else 0
            flops += 3 * count * token.rope.rotary_dim if name != "v" and token.rope else 0
        return self.rows * flops

    def bytes_moved(self) -> int:
        """q twice, k and v once, and one token a row in each cache."""
        sizes = {"q": 2 * self.head_dim, "k": self.head_dim, "v": self.value_dim}
        values = sum(count * sizes[name] for name, count in self.counts.items())
        stored = self.layout.pair_nbytes if self.token.appends else 0
        return self.rows * (4 * values + stored)


def _different_tokens(
    spec: PrepareTokens, rng: np.random.Generator, table: Array | None
) -> dict[str, Array]:
    """Sequences and positions; one token per slot, even in shared pages."""
    layout, found = spec.layout, dict[tuple[int, int], int]()
    for _ in range(20 * spec.rows):
        sequence = int(rng.integers(layout.sequences))
        position = int(rng.integers(layout.max_len))
        paged = spec.token.appends and layout.is_paged
        at = layout if paged or not layout.is_paged else None
        slot = position if at is None else int(at.slots_of(sequence, [position], table)[0, 0])
        if slot not in found.values() and len(found) < spec.rows:
            found[sequence, position] = slot
    rows = [*found] + [(0, layout.max_len)] * (spec.rows - len(found))
    if spec.rows > 2:
        rows[1] = (0, layout.max_len + int(rng.integers(0, 2)) * 1000)
    sequence_of, position_of = np.array(rows, np.uint32).T.copy()
    positions = {"position": position_of}
    return positions | ({"sequence": sequence_of} if spec.token.appends else {})
