"""Floating-point arithmetic that numpy lacks: fused, directed, flushed, saturated.

Functions work on whole arrays and are exact unless stated otherwise.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TIE = int(np.iinfo(np.int64).min)
_DROPPED = np.array(35, np.int64)
#: The least normal numbers.
_TINY = {np.dtype(kind): np.finfo(kind).tiny for kind in ("f2", "f4", "f8")}


class Underflow(threading.local):
    """Set by numpy (errstate ``call``) when an operation of this thread underflowed; fma looks at
    it."""

    seen = False

    def __call__(self, kind: str, flag: int) -> None:
        """Take numpy's report."""
        self.seen = True


#: The machine runs under ``np.errstate(all="ignore", under="call", call=underflow)``.
underflow = Underflow()


def fma_32(
    a: Array, b: Array, c: Array, out: Array, scratch: tuple[Array, Array, Array], bits: Array
) -> None:
    """``out = a * b + c`` rounded once to float32; the last ones are float64/int64 scratch.

    The float64 product of two float32 is exact and their sum is rounded to 53 bits, so a second
    rounding to 24 bits goes wrong only where the float64 sum is inexact and lies on a midpoint of
    two float32. Both are rare: lanes on a midpoint of normal numbers are found by their low 29
    bits, subnormal results by the processor's underflow flag.
    """
    product, addend, total = scratch
    product[...] = a
    addend[...] = b
    np.multiply(product, addend, product)
    addend[...] = c
    np.add(product, addend, total)
    np.left_shift(total.view(np.int64), _DROPPED, bits)
    if bits.item(bits.argmin()) == _TIE:
        _fix_lanes((bits == _TIE).nonzero()[0], product, addend, total)
    underflow.seen = False
    out[...] = total
    if underflow.seen:
        tiny = np.abs(total) < _TINY[out.dtype]
        _fix_lanes(tiny.nonzero()[0], product, addend, total)
        out[...] = total


def _fix_lanes(lanes: Array, product: Array, addend: Array, total: Array) -> None:
    """Round some lanes' sums to odd, in place.

    Most midpoints are exact sums (of quantised values, say), which need nothing.
    """
    x, y, z = product.take(lanes), addend.take(lanes), total.take(lanes)
    if np.count_nonzero(_errors(x, y, z)):
        total[lanes] = to_odd(x, y, z)


#: Operands and result of an fma: ``out = a * b + c``.
Fma = tuple[Array, Array, Array, Array]

#: Lanes of all instructions, above which each of a run is computed alone: numpy's calls cost little
#: then.
_MOST_OF_RUNS = 1 << 14


class _Rows(threading.local):
    """Scratch memory of runs; a thread has its own."""

    def __init__(self) -> None:
        self._memory = np.empty((4, _MOST_OF_RUNS))
        self._known: dict[tuple[int, int], tuple[Any, ...]] = {}

    def of(self, count: int, lanes: int) -> tuple[Any, ...]:
        """Three float64 arrays (count, lanes), their rows, the bits of the third, and an int64
        array."""
        found = self._known.get((count, lanes))
        if found is None:
            if len(self._known) == 64:
                self._known.clear()
            used = self._memory[:, : count * lanes]
            x, y, z = used[:3].reshape(3, count, lanes)
            found = (x, y, z, tuple(zip(x, y, z, strict=True)), *used[2:].view(np.int64))
            self._known[count, lanes] = found
        return found


_rows = _Rows()


def fma_run(run: Sequence[Fma], scratch: tuple[Array, Array, Array], bits: Array) -> None:
    """Several `fma_32`, one after the other, of which none writes a factor of any.

    Products, and the search for midpoints, are of all at once. Where rounding twice might go wrong
    all begin again from the addends, one by one.
    """
    lanes = run[0][3].size
    if len(run) * lanes > _MOST_OF_RUNS:
        for fma in run:
            fma_32(*fma, scratch, bits)
        return
    products, addends, totals, rows, words, low = _rows.of(len(run), lanes)
    for (a, b, _, _), (product, addend, _) in zip(run, rows, strict=True):
        product[...] = a
        addend[...] = b
    np.multiply(products, addends, products)
    underflow.seen = False
    for (_, _, c, out), (product, addend, total) in zip(run, rows, strict=True):
        addend[...] = c
        np.add(product, addend, total)
        out[...] = total
    if not underflow.seen:
        np.left_shift(words, _DROPPED, low)
        if low.item(low.argmin()) != _TIE:
            return
        at = (low == _TIE).nonzero()[0]
        if not np.count_nonzero(_errors(*(each.take(at) for each in (products, addends, totals)))):
            return
    changed = {id(out) for _, _, _, out in run}
    for (_, _, c, _), (_, addend, _) in zip(run, rows, strict=True):
        if id(c) in changed:
            c[...] = addend
            changed.remove(id(c))  # later addends are results
    for fma in run:
        fma_32(*fma, scratch, bits)


def _errors(x: Array, y: Array, total: Array) -> Array:
    """The rounding errors of total = x + y (Knuth's TwoSum)."""
    part = total - x
    error: Array = (x - (total - part)) + (y - part)
    return error


def to_odd(product: Array, addend: Array, total: Array) -> Array:
    """product + addend rounded to odd in float64 (Boldo & Melquiond 2008), from its rounded sum.

    An inexact sum whose last bit is even moves one step towards the exact value, so that a later
    rounding to fewer bits sees that it was inexact.
    """
    error = _errors(product, addend.astype(np.float64), total)
    if not np.count_nonzero(error):
        return total
    even = (total.view(np.int64) & 1) == 0
    fix = even & (error != 0) & np.isfinite(total)
    return np.where(fix, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def round_directed(exactto_odd: Array, mode: str) -> Array:
    """A float64 (rounded to odd) to float32 toward zero, minus or plus infinity."""
    x = exactto_odd
    nearest = x.astype(np.float32)
    back = nearest.astype(np.float64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(x)
        toward = np.zeros((), np.float32)
    else:
        wrong = back > x if mode == "rm" else back < x
        toward = np.array(-np.inf if mode == "rm" else np.inf, np.float32)
    return np.where(wrong, np.nextafter(nearest, toward), nearest)


def round_to_f32(x: Array, mode: str) -> Array:
    """float64 to float32 in the rounding mode ``rn``, ``rz``, ``rm`` or ``rp``."""
    return x.astype(np.float32) if mode == "rn" else round_directed(x, mode)


def widen(*values: Array) -> list[Array]:
    """Operands as float64 of one shape."""
    return [np.atleast_1d(v).astype(np.float64) for v in np.broadcast_arrays(*values)]


def fma_directed(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fma.{rz,rm,rp}.f32."""
    x, y, z = widen(a, b, c)
    product = x * y
    result = round_directed(to_odd(product, z, product + z), mode)
    return _zero_sum(result, product, z, mode)


def _zero_sum(result: Array, x: Array, y: Array, mode: str) -> Array:
    """An exact zero sum of opposite terms is -0 when rounding down (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    cancelled = (x + y == 0) & (np.signbit(x) != np.signbit(y))
    return np.where(cancelled, -np.zeros((), result.dtype), result)


def add_directed(a: Array, b: Array, mode: str) -> Array:
    """add.{rz,rm,rp}.f32."""
    x, y = widen(a, b)
    return _zero_sum(round_directed(to_odd(x, y, x + y), mode), x, y, mode)


def sub_directed(a: Array, b: Array, mode: str) -> Array:
    """sub.{rz,rm,rp}.f32."""
    return add_directed(a, -b, mode)


def mul_directed(a: Array, b: Array, mode: str) -> Array:
    """mul.{rz,rm,rp}.f32."""
    x, y = widen(a, b)
    return round_directed(x * y, mode)


def div_directed(a: Array, b: Array, mode: str) -> Array:
    """div.{rz,rm,rp}.f32: the float64 quotient is on the right side of every float32 it is not."""
    x, y = widen(a, b)
    return round_directed(x / y, mode)


def integer_to_odd(x: Array) -> Array:
    """64-bit integers to float64, rounded to odd."""
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    high: Array = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
    return to_odd(high, low, high + low)


def integer_directed(x: Array, mode: str) -> Array:
    """64-bit integers to float64 toward zero, minus or plus infinity."""
    x = np.atleast_1d(x)
    return np.array([_directed(v, float(v), mode) for v in x.tolist()])


def directed_64(name: str, a: Array, b: Array, mode: str) -> Array:
    """add, sub and mul.{rz,rm,rp}.f64: exact rational arithmetic, lane by lane."""
    from fractions import Fraction

    function = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[name]
    a, b = (np.atleast_1d(v) for v in np.broadcast_arrays(a, b))
    result: Array = function(a, b)
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b)).tolist():
        exact = function(Fraction(float(a[i])), Fraction(float(b[i])))
        result[i] = _directed(exact, float(result[i]), mode)
    if name == "mul":
        return result
    return _zero_sum(result, a, b if name == "add" else -b, mode)


def _directed(exact: Any, nearest: float, mode: str) -> float:
    """The neighbour of an exact number in a direction; ``nearest`` is its nearest float64."""
    if mode == "rz":
        wrong, toward = abs(nearest) > abs(exact), 0.0
    elif mode == "rm":
        wrong, toward = nearest > exact, -math.inf
    else:
        wrong, toward = nearest < exact, math.inf
    return math.nextafter(nearest, toward) if wrong else nearest


def fma_64(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f64, correctly rounded: exact rational arithmetic, lane by lane where not trivial."""
    from fractions import Fraction

    result = a * b + c
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)).tolist():
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                result[i] = float(exact)
            except OverflowError:
                result[i] = np.inf if exact > 0 else -np.inf
    return result


def flush(x: Array) -> Array:
    """Subnormals to zero of their sign (.ftz)."""
    tiny = np.abs(x) < _TINY[x.dtype]
    if not np.count_nonzero(tiny):
        return x
    return np.where(tiny, np.copysign(np.zeros((), x.dtype), x), x)


def saturate(x: Array) -> None:
    """Clamp in place to [0, 1], NaN to 0 (.sat)."""
    np.fmax(x, 0, out=x)
    np.fmin(x, 1, out=x)
    np.add(x, 0, out=x)  # -0 to +0


def is_subnormal(x: Array) -> Array:
    """testp.subnormal."""
    result: Array = (np.abs(x) < _TINY[x.dtype]) & (x != 0)
    return result


def is_normal(x: Array) -> Array:
    """testp.normal: zeros are normal (PTX ISA, testp)."""
    result: Array = np.isfinite(x) & ((np.abs(x) >= _TINY[x.dtype]) | (x == 0))
    return result


def float_min(a: Array, b: Array, out: Array, nan: bool) -> None:
    """min: a NaN loses (or wins, .NaN), -0 is below +0."""
    _extreme(np.minimum if nan else np.fmin, a, b, out, np.bitwise_or)


def float_max(a: Array, b: Array, out: Array, nan: bool) -> None:
    """max: a NaN loses (or wins, .NaN), +0 is above -0."""
    _extreme(np.maximum if nan else np.fmax, a, b, out, np.bitwise_and)


def _extreme(choose: np.ufunc, a: Array, b: Array, out: Array, of_zeros: np.ufunc) -> None:
    choose(a, b, out=out)
    zero = (out == 0).nonzero()[0]
    if zero.size:
        bits = f"u{out.dtype.itemsize}"
        x, y = (np.broadcast_to(v, out.shape)[zero] for v in (a, b))
        both = (x == 0) & (y == 0)
        signs = of_zeros(x.view(bits), y.view(bits)).view(out.dtype)
        out[zero] = np.where(both, signs, out[zero])
