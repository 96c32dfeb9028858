"""Atomic read-modify-write of many lanes at once, in lane order where they collide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# New value from (old, a, b).
_UPDATES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "add": lambda old, a, b: old + a,
    "min": lambda old, a, b: np.minimum(old, a),
    "max": lambda old, a, b: np.maximum(old, a),
    "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a,
    "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a,
    "cas": lambda old, a, b: np.where(old == a, b, old).astype(old.dtype),
    "inc": lambda old, a, b: np.where(old >= a, 0, old + 1).astype(old.dtype),
    "dec": lambda old, a, b: np.where((old == 0) | (old > a), a, old - 1).astype(old.dtype),
}


def read_modify_write(
    operation: str, view: Array, index: Array, a: Array, b: Array | None
) -> tuple[Array, bool]:
    """Apply ``operation`` to ``view[index]``; returns the old values and whether any changed.

    Lanes with the same index take effect one after the other, in order.
    """
    typed = view.view(a.dtype)
    other = a if b is None else b
    update = _UPDATES[operation]
    if index.size == 1 or np.unique(index).size == index.size:
        old = typed[index]
        new = update(old, a, other)
        typed[index] = new
        return old, not np.array_equal(old.view(view.dtype), new.view(view.dtype))
    old = np.empty_like(a)
    changed = False
    # Rounds of distinct addresses: round k holds each address's k-th lane.
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    starts = np.repeat(first, np.diff(np.append(first, index.size)))
    rank = np.arange(index.size) - starts
    by_rank = order[np.argsort(rank, kind="stable")]
    edges = np.concatenate(([0], np.cumsum(np.bincount(rank))))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        lanes = by_rank[begin:end]
        at = index[lanes]
        before = typed[at]
        after = update(before, a[lanes], other[lanes])
        typed[at] = after
        old[lanes] = before
        changed = changed or not np.array_equal(before.view(view.dtype), after.view(view.dtype))
    return old, changed
