"""Attention over a block of keys in numpy: what it takes from earlier blocks, leaves for later."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from urdir.ptxgen.kernels.attention.reference import Attention, weighted
from urdir.ptxgen.spec import Array

#: Lanes of a warp that share a query: lane t has keys 8n + 2t and 8n + 2t + 1.
LANES = 4


class BlockAttention(Attention, Protocol):
    """See `prefill_block.PrefillBlock`."""

    @property
    def tokens(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def tiles(self) -> int: ...


def attend_to_block(
    spec: BlockAttention, inputs: dict[str, Array]
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
    spec: BlockAttention, inputs: dict[str, Array], row: int, begins: bool
) -> tuple[Array, Array, Array]:
    """The results of earlier blocks for a row: the maximum (heads,), sums of weights (heads,
    lanes), weighted values (heads, value_dim)."""
    if begins:
        shape = (spec.heads, spec.value_dim)
        return np.full(spec.heads, -np.inf), np.zeros((spec.heads, LANES)), np.zeros(shape)
    softmax = inputs["softmax"][row].astype(np.float64)
    return softmax[:, 0, 0], softmax[:, :, 1], inputs["partial"][row].astype(np.float64)


def _last_keys(spec: BlockAttention, position: Array) -> Array:
    """The last key visible to a query of each query's tile, (rows, heads)."""
    query = np.arange(spec.rows)[:, None] * spec.group + np.arange(spec.heads) % spec.group
    last = np.full(spec.tiles, position.min())
    np.maximum.at(last, query // spec.queries, position[:, None])
    found: Array = last[query // spec.queries]
    return found
