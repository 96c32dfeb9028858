"""Exchange between the lanes of a warp: shuffles, votes, reductions (PTX ISA 9.7.9, 9.7.13).

A group's values are laid out as (warps, 32) arrays. A group of whole warps is such an array
already; of a scattered group the absent lanes are filled in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WARP = 32
#: What a shuffle from an absent lane yields: undefined in PTX, here a NaN easy to recognise.
POISON = 0x7FFFDEAD

_LANES = np.arange(WARP)
_BITS = (np.uint32(1) << np.arange(WARP, dtype=np.uint32)).astype(np.uint32)


class WholeWarps:
    """A group that is all lanes of its warps, in order."""

    present: Array | None = None

    def count(self, values: Array) -> int:
        """The number of warps of the lanes whose values are given."""
        return values.size // WARP

    def spread(self, values: Array) -> Array:
        """Values of the lanes (n,) as (warps, 32)."""
        return values.reshape(-1, WARP)

    def collect(self, values: Array) -> Array:
        """The inverse of ``spread``."""
        return values.reshape(-1)

    def per_warp(self, value: Array | int) -> Array | int:
        """An operand that all lanes of a warp share, such as a member mask, as (warps, 1)."""
        if isinstance(value, int) or value.size == 1:
            return value
        return self.spread(value)[:, :1]

    # ---- shuffles ----

    def shfl(self, mode: str, a: Array, b: Array | int, c: Array | int) -> Array:
        """shfl.sync: each lane's value from the lane that (mode, b, c) names."""
        if isinstance(b, int) and isinstance(c, int):
            source, _ = _shuffle_map(mode, b, c)
            spread = self.spread(a)
            result = spread.take(source, 1)
            if self.present is not None:
                result[~self.present[:, source]] = POISON
            return self.collect(result)
        source, _ = self._sources(mode, b, c)
        spread = self.spread(a)
        result = np.take_along_axis(spread, source, 1)
        if self.present is not None:
            result[~np.take_along_axis(self.present, source, 1)] = POISON
        return self.collect(result)

    def shfl_valid(self, mode: str, b: Array | int, c: Array | int, n: int) -> Array:
        """The predicate of shfl.sync: the source lane lies in its segment."""
        if isinstance(b, int) and isinstance(c, int):
            _, valid = _shuffle_map(mode, b, c)
            return self.collect(np.broadcast_to(valid, (self._rows(n), WARP)))
        return self.collect(self._sources(mode, b, c)[1])

    def _rows(self, n: int) -> int:
        return n // WARP

    def _sources(self, mode: str, b: Array | int, c: Array | int) -> tuple[Array, Array]:
        operands = [v if isinstance(v, int) else self.spread(v).astype(np.int64) for v in (b, c)]
        source, valid = _source_lanes(mode, *operands)
        shape = np.broadcast_shapes(source.shape, (1, WARP))
        return np.broadcast_to(source, shape), np.broadcast_to(valid, shape)

    # ---- votes ----

    def ballot(self, predicate: Array, mask: Array | int) -> Array:
        """vote.sync.ballot: one bit a lane, (n,) uint32."""
        return self.collect(np.repeat(self._words(predicate, mask), WARP, 1))

    def vote(self, mode: str, predicate: Array, mask: Array | int) -> Array:
        """vote.sync.{all,any,uni}: (n,) bool."""
        words = self._words(predicate, mask)
        members = self._members(mask)
        if mode == "any":
            result = words != 0
        elif mode == "all":
            result = words == members
        else:
            result = (words == 0) | (words == members)
        return self.collect(np.repeat(result, WARP, 1))

    def active(self, n: int) -> Array:
        """activemask: (n,) uint32."""
        if self.present is None:
            return np.full(n, 0xFFFFFFFF, np.uint32)
        return self.collect(np.repeat(self._words(np.ones(n, np.bool_), 0xFFFFFFFF), WARP, 1))

    def _members(self, mask: Array | int) -> Array:
        """The lanes that are named by the mask and present, as words (warps, 1)."""
        word = np.asarray(self.per_warp(mask), np.uint32).reshape(-1, 1)
        if self.present is None:
            return word
        return word & _pack(self.present)

    def _words(self, predicate: Array, mask: Array | int) -> Array:
        return _pack(self.spread(predicate)) & self._members(mask)

    def elect(self, mask: Array | int, n: int) -> tuple[Array, Array]:
        """elect.sync: the leader's lane (n,) uint32, and whether a lane is it (n,) bool."""
        word = self._members(mask).astype(np.int64)
        leader = np.bitwise_count((word & -word) - 1)
        rows = max(leader.shape[0], self._rows(n))
        leader = np.broadcast_to(leader, (rows, WARP)).astype(np.uint32)
        return self.collect(leader), self.collect(leader == _LANES)

    # ---- reductions ----

    def redux(self, operation: str, a: Array, mask: Array | int) -> Array:
        """redux.sync over the members: (n,) of a's type."""
        reduce, identity = _REDUCTIONS[operation](a.dtype)
        members = (self._members(mask) & _BITS) != 0
        values = np.where(members, self.spread(a), identity)
        return self.collect(np.repeat(reduce(values, axis=1, keepdims=True), WARP, 1))

    def match(self, mode: str, a: Array, mask: Array | int) -> tuple[Array, Array]:
        """match.sync.{any,all}: lanes with an equal value (n,) uint32, and all's predicate."""
        values = self.spread(a)
        members = np.broadcast_to(self._members(mask), (values.shape[0], 1))
        equal = values[:, :, None] == values[:, None, :]
        words = np.bitwise_or.reduce(np.where(equal, _BITS, np.uint32(0)), axis=2) & members
        if mode == "any":
            return self.collect(words), np.ones(0, np.bool_)
        same = words == members
        return self.collect(np.where(same, words, np.uint32(0))), self.collect(same)


class ScatteredWarps(WholeWarps):
    """Any set of lanes, by number (32 numbers a warp)."""

    def __init__(self, lanes: Array) -> None:
        warps, row = np.unique(lanes >> 5, return_inverse=True)
        self.slot = row * WARP + (lanes & 31)
        self.rows = int(warps.size)
        self.present = np.zeros((self.rows, WARP), np.bool_)
        self.present.reshape(-1)[self.slot] = True

    def count(self, values: Array) -> int:
        """The number of warps with some of the lanes."""
        return self.rows

    def spread(self, values: Array) -> Array:
        """Values as (warps, 32), zero for absent lanes."""
        result = np.zeros(self.rows * WARP, values.dtype)
        result[self.slot] = values
        return result.reshape(-1, WARP)

    def collect(self, values: Array) -> Array:
        """The values of the present lanes."""
        present: Array = values.reshape(-1)[self.slot]
        return present

    def per_warp(self, value: Array | int) -> Array | int:
        """The value of each warp's first present lane."""
        if isinstance(value, int) or value.size == 1:
            return value
        assert self.present is not None
        first = self.present.argmax(1)
        column: Array = self.spread(value)[np.arange(self.rows), first][:, None]
        return column

    def _rows(self, n: int) -> int:
        return self.rows


@functools.cache
def _shuffle_map(mode: str, b: int, c: int) -> tuple[Array, Array]:
    """Source lane and predicate of each lane, (32,)."""
    source, valid = _source_lanes(mode, b, c)
    return np.ascontiguousarray(source), np.ascontiguousarray(valid)


def _source_lanes(mode: str, b: Any, c: Any) -> tuple[Array, Array]:
    """PTX ISA 9.7.9.6, the pseudo code of shfl.sync."""
    by, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    high = (_LANES & segment) | (clamp & ~segment & 31)
    low = _LANES & segment
    if mode == "up":
        lane = _LANES - by
        valid = lane >= high
    elif mode == "down":
        lane = _LANES + by
        valid = lane <= high
    elif mode == "bfly":
        lane = _LANES ^ by
        valid = lane <= high
    else:
        lane = low | (by & ~segment & 31)
        valid = lane <= high
    lane, valid = np.broadcast_arrays(lane, valid)  # one of b and c may differ by lane
    return np.where(valid, lane, _LANES), valid


def _pack(flags: Array) -> Array:
    """(warps, 32) bool to (warps, 1) uint32."""
    return np.packbits(flags, axis=1, bitorder="little").view(np.uint32)


def _reduction(
    ufunc: np.ufunc, identity: Callable[[np.dtype[Any]], int]
) -> Callable[[np.dtype[Any]], tuple[Callable[..., Array], Any]]:
    def make(dtype: np.dtype[Any]) -> tuple[Callable[..., Array], Any]:
        return functools.partial(ufunc.reduce, dtype=dtype), dtype.type(identity(dtype))

    return make


_REDUCTIONS = {
    "add": _reduction(np.add, lambda t: 0),
    "min": _reduction(np.minimum, lambda t: int(np.iinfo(t).max)),
    "max": _reduction(np.maximum, lambda t: int(np.iinfo(t).min)),
    "and": _reduction(np.bitwise_and, lambda t: int(np.iinfo(t).max)),
    "or": _reduction(np.bitwise_or, lambda t: 0),
    "xor": _reduction(np.bitwise_xor, lambda t: 0),
}
