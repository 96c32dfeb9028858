"""Chunked-context prefill attention: causal attention over blocks of keys, one launch per block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.reference import weighted
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.packed import unpack

#: A position of padding rows.
IDLE = 0xFFFFFFFF
#: Lanes of a warp that share a query: lane t has keys 8n + 2t and 8n + 2t + 1.
LANES = 4


@dataclass(frozen=True)
class PrefillBlock(PrefillWgmma):
    """Attention of prompt chunks over a block of the keys of sequences of up to ``tokens`` tokens.

    See PrefillWgmma. The keys of all sequences of the step form a *walk*: those of a row's sequence
    start at key ``begin`` (rows,) of it, a multiple of ``key_tile``, and so do blocks. Of the
    ``layout.max_len`` keys of the caches a block has the first ``length``, which are those of the
    walk from ``first`` on, also in whole tiles. From block to block ``partial`` (rows, heads,
    value_dim) and ``softmax`` (rows, heads, 4, 2) carry the sums of weighted values and, per lane
    of a query, the maximum exponent (of 2) and the sum of weights. A tile of queries starts them
    with the block of its sequence's first key and ends with that of its last visible key, which
    computes its ``out``; other blocks do not change them.

    A row has the same bits in any chunk, and wherever its keys are in the walk: those of
    PrefillWgmma. Scores have no window, sinks or ALiBi, values at most 128 dims.
    """

    tokens: int = 0

    name = "prefill_block"
    template = PrefillWgmma.template
    is_block = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.max_len % self.cta.key_tile or self.tokens < 1:
            raise PtxgenError(
                f"a block of {self.layout.max_len} keys of sequences of {self.tokens} tokens: it "
                f"has whole tiles of {self.cta.key_tile}"
            )
        if self.cta.parts > 1 or self.scores.span or self.scores.sinks or self.scores.max_bias:
            raise PtxgenError("blocks are for values of up to 128 dims and plain scores")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("count", "u32"),
            Param("first", "u32"),
            Param("length", "u32"),
            *self.input_params,
            Param("begin", "u32", ("rows",), Access.IN),
            Param("partial", "f32", ("rows", "heads", "value_dim"), Access.INOUT),
            Param("softmax", "f32", ("rows", "heads", LANES, 2), Access.INOUT),
            # that of tiles which do not end here is unchanged
            replace(self.out.param, access=Access.INOUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        carried, out, ends = _attend_to_block(self, inputs)
        before = inputs["out"]
        if self.packs:
            before = unpack(before, self.rows, self.heads * self.value_dim).reshape(out.shape)
        made = np.where(ends[:, :, None], out, before)
        return carried | {"out": self.out.of(made.astype(np.float32), inputs)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return _random_block(self, rng)

    @classmethod
    def examples(cls) -> dict[str, PrefillBlock]:
        wide = KvLayout(1, 2, 192, 192, "f16", value_dim=128)
        return {
            "one tile": cls(2, KvLayout(1, 2, 112, 64, "f16"), rows=7, tokens=300),
            "packs": cls(2, wide, rows=35, packs=True, tokens=700),
            "softcap": cls(
                6, KvLayout(1, 2, 224, 96, "f16", value_dim=64), 90, Scores(softcap=5.0), tokens=448
            ),
        }


def _random_block(spec: PrefillBlock, rng: np.random.Generator) -> dict[str, Any]:
    """A chunk whose last rows see more than the block, or whose first rows less; the last of
    several rows is padding. Another sequence may precede it in the walk."""
    tile = spec.cta.key_tile
    length = tile * int(rng.integers(1, spec.layout.max_len // tile + 1))
    first = length * int(rng.integers(0, ceil_div(spec.tokens, length)))
    most = min(spec.tokens, first + length + spec.rows) - spec.rows
    start = int(rng.integers(max(0, first - spec.rows // 2), most + 1))
    begin = tile * int(rng.integers(0, length // tile))
    position = start + np.arange(spec.rows)
    if spec.rows > 1:
        position[-1] = IDLE
    position[position >= spec.tokens] = IDLE
    place = position + begin
    seen = np.where(place < first, 0, np.minimum(place - first, length - 1))
    seen[position == IDLE] = IDLE
    inputs = attention_inputs(spec, rng, seen.tolist(), [0] * spec.rows)
    inputs |= {"first": np.uint32(first), "length": np.uint32(length)}
    inputs["position"] = position.astype(np.uint32)
    inputs["begin"] = np.full(spec.rows, begin, np.uint32)
    shape = (spec.rows, spec.heads, spec.value_dim)
    inputs["partial"], out = rng.standard_normal((2, *shape)).astype(np.float32)
    maxima = np.repeat(rng.normal(0, 3, shape[:2])[:, :, None], LANES, axis=2)
    sums = rng.uniform(1, 5, maxima.shape)
    inputs["softmax"] = np.stack([maxima, sums], axis=3).astype(np.float32)
    inputs["out"] = spec.out.of(out, inputs)
    return inputs


def _attend_to_block(
    spec: PrefillBlock, inputs: dict[str, Array]
) -> tuple[dict[str, Array], Array, Array]:
    """``partial`` and ``softmax`` after the launch; of queries whose tile ends here their output
    (rows, heads, value_dim) f32; and which ones these are, (rows, heads)."""
    first, length = int(inputs["first"]), int(inputs["length"])
    position, begin = (inputs[name].astype(np.int64) for name in ("position", "begin"))
    live = position < spec.tokens
    # from here on in keys of this block
    position, begin = position + begin - first, begin - first
    last = _last_keys(spec, np.where(live, position, -length - first))
    # the same for all rows of a tile
    begun = begin[:, None]
    ends = (begun < length) & (last < length) & ((last >= 0) | (begun >= 0))
    made = {name: inputs[name].copy() for name in ("partial", "softmax")}
    out = np.zeros(made["partial"].shape, np.float32)
    here = inputs | {"position": position}
    for row in np.flatnonzero(live & (begin < length)).tolist():
        top, total, values = _carried(spec, inputs, row, begins=begin[row] >= 0)
        if position[row] >= 0:
            seen = max(begin[row], 0), min(position[row], length - 1)
            own_top, weights, own_values = weighted(spec, here, row, *seen)
            most = np.maximum(top, own_top)
            factors = np.exp2(top - most), np.exp2(own_top - most)
            lanes = np.arange(seen[0], seen[1] + 1) % (2 * LANES) // 2
            own = [weights[:, lanes == lane].sum(axis=1) for lane in range(LANES)]
            total = factors[0][:, None] * total + factors[1][:, None] * np.stack(own, axis=1)
            values = factors[0][:, None] * values + factors[1][:, None] * own_values
            top = most
        if ends[row].any():
            out[row] = values / total.sum(axis=1)[:, None]
        goes_on = ~ends[row] & (position[row] >= 0)
        made["partial"][row, goes_on] = values[goes_on]
        carried = np.stack([np.broadcast_to(top[:, None], total.shape), total], axis=2)
        made["softmax"][row, goes_on] = carried[goes_on]
    return made, out, ends


def _carried(
    spec: PrefillBlock, inputs: dict[str, Array], row: int, begins: bool
) -> tuple[Array, Array, Array]:
    """The results of earlier blocks for a row: the maximum (heads,), sums of weights (heads,
    lanes), weighted values (heads, value_dim)."""
    if begins:
        shape = (spec.heads, spec.value_dim)
        return np.full(spec.heads, -np.inf), np.zeros((spec.heads, LANES)), np.zeros(shape)
    softmax = inputs["softmax"][row].astype(np.float64)
    return softmax[:, 0, 0], softmax[:, :, 1], inputs["partial"][row].astype(np.float64)


def _last_keys(spec: PrefillBlock, position: Array) -> Array:
    """The last key visible to a query of each query's tile, (rows, heads)."""
    query = np.arange(spec.rows)[:, None] * spec.group + np.arange(spec.heads) % spec.group
    last = np.full(spec.tiles, position.min())
    np.maximum.at(last, query // spec.queries, position[:, None])
    found: Array = last[query // spec.queries]
    return found
