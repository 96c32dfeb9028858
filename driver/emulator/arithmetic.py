"""Arithmetic that numpy lacks: fused and directed rounding, bit fields, byte dot products.

Everything is a function of whole arrays and exact unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TIE = np.int64(np.iinfo(np.int64).min)
_DROPPED = np.array(35, np.int64)
_TINY = {np.dtype("f4"): np.float32(2.0**-126), np.dtype("f8"): np.float64(2.0**-1022)}


class Underflow:
    """Set by numpy (errstate ``call``) when an operation underflowed; fma looks at it."""

    seen = False

    def __call__(self, kind: str, flag: int) -> None:
        """Take numpy's report."""
        self.seen = True


#: The machine runs under ``np.errstate(all="ignore", under="call", call=underflow)``.
underflow = Underflow()


def fma_32(
    a: Array, b: Array, c: Array, out: Array, product: Array, total: Array, bits: Array
) -> None:
    """``out = a * b + c`` rounded once to float32; the last three are float64/int64 scratch.

    The float64 product of two float32 is exact and their sum is rounded to 53 bits, so a second
    rounding to 24 bits goes wrong only where the float64 sum is inexact and lies on a midpoint of
    two float32. Both are rare: lanes on a midpoint of normal numbers are found by their low 29
    bits, subnormal results by the processor's underflow flag.
    """
    product[...] = a
    total[...] = b
    np.multiply(product, total, product)
    total[...] = c
    np.add(product, total, total)
    underflow.seen = False
    out_before = out if out is not a and out is not b and out is not c else None
    np.left_shift(total.view(np.int64), _DROPPED, bits)
    if np.minimum.reduce(bits) == _TIE:
        total[...] = _to_odd(product, c, total)
    if out_before is None:
        narrow = total.astype(np.float32)
        if underflow.seen:
            narrow = _to_odd(product, c, total).astype(np.float32)
        out[...] = narrow
        return
    out[...] = total
    if underflow.seen:
        out[...] = _to_odd(product, c, total)


def _to_odd(product: Array, addend: Array, total: Array) -> Array:
    """product + addend rounded to odd in float64 (Boldo & Melquiond 2008), from its rounded sum.

    An inexact sum whose last bit is even moves one step towards the exact value, so that a later
    rounding to fewer bits sees that it was inexact.
    """
    x, y = product, addend.astype(np.float64)
    z = total - x
    error = (x - (total - z)) + (y - z)
    even = (total.view(np.int64) & 1) == 0
    fix = even & (error != 0) & np.isfinite(total)
    return np.where(fix, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def _round_directed(exact_to_odd: Array, mode: str) -> Array:
    """A float64 (rounded to odd) to float32 toward zero, minus or plus infinity."""
    x = exact_to_odd
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
    return x.astype(np.float32) if mode == "rn" else _round_directed(x, mode)


def _wide(*values: Array) -> list[Array]:
    return [np.atleast_1d(v).astype(np.float64) for v in np.broadcast_arrays(*values)]


def fma_directed(a: Array, b: Array, c: Array, mode: str) -> Array:
    """fma.{rz,rm,rp}.f32."""
    x, y, z = _wide(a, b, c)
    product = x * y
    result = _round_directed(_to_odd(product, z, product + z), mode)
    return _zero_sum(result, product, z, mode)


def _zero_sum(result: Array, x: Array, y: Array, mode: str) -> Array:
    """An exact zero sum of opposite terms is -0 when rounding down (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    cancelled = (x + y == 0) & (np.signbit(x) != np.signbit(y))
    return np.where(cancelled, np.float32(-0.0), result)


def add_directed(a: Array, b: Array, mode: str) -> Array:
    """add.{rz,rm,rp}.f32."""
    x, y = _wide(a, b)
    return _zero_sum(_round_directed(_to_odd(x, y, x + y), mode), x, y, mode)


def sub_directed(a: Array, b: Array, mode: str) -> Array:
    """sub.{rz,rm,rp}.f32."""
    return add_directed(a, -b, mode)


def mul_directed(a: Array, b: Array, mode: str) -> Array:
    """mul.{rz,rm,rp}.f32."""
    x, y = _wide(a, b)
    return _round_directed(x * y, mode)


def div_directed(a: Array, b: Array, mode: str) -> Array:
    """div.{rz,rm,rp}.f32: the float64 quotient is on the right side of every float32 it is not."""
    x, y = _wide(a, b)
    return _round_directed(x / y, mode)


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
    return np.where(tiny, np.copysign(np.zeros((), x.dtype), x), x)


def saturate(x: Array) -> None:
    """Clamp in place to [0, 1], NaN to 0 (.sat)."""
    np.fmax(x, 0, out=x)
    np.fmin(x, 1, out=x)
    np.add(x, 0, out=x)  # -0 to +0


def is_subnormal(x: Array) -> Array:
    """testp.subnormal."""
    return (np.abs(x) < _TINY[x.dtype]) & (x != 0)


def is_normal(x: Array) -> Array:
    """testp.normal."""
    return np.isfinite(x) & (np.abs(x) >= _TINY[x.dtype])


def float_min(a: Array, b: Array, out: Array, nan: bool) -> None:
    """min: a NaN loses (or wins, .NaN), -0 is below +0."""
    _extreme(np.minimum if nan else np.fmin, a, b, out, np.bitwise_or)


def float_max(a: Array, b: Array, out: Array, nan: bool) -> None:
    """max: a NaN loses (or wins, .NaN), +0 is above -0."""
    _extreme(np.maximum if nan else np.fmax, a, b, out, np.bitwise_and)


def _extreme(choose: np.ufunc, a: Array, b: Array, out: Array, of_zeros: np.ufunc) -> None:
    choose(a, b, out=out)
    zero = np.flatnonzero(out == 0)
    if zero.size:
        bits = f"u{out.dtype.itemsize}"
        x, y = (np.broadcast_to(v, out.shape)[zero] for v in (a, b))
        both = (x == 0) & (y == 0)
        signs = of_zeros(x.view(bits), y.view(bits)).view(out.dtype)
        out[zero] = np.where(both, signs, out[zero])


# ---- half precision ----


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits to float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f64_to_bf16(x: Array, mode: str = "rn") -> Array:
    """Round float64 once to bf16 bits; NaN is 0x7FFF."""
    up = x.astype(np.float32)
    if mode == "rn":
        # to odd in float32 first, so that the second rounding cannot go wrong
        down = _round_directed(x, "rz")
        inexact = (down.astype(np.float64) != x) & np.isfinite(x)
        bits = down.view(np.uint32) | inexact.astype(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        bits = _round_directed(x, mode).view(np.uint32)
        away = {"rz": np.False_, "rm": np.signbit(up), "rp": ~np.signbit(up)}[mode]
        step = ((bits & 0xFFFF) != 0) & away & np.isfinite(up)
        rounded = (bits >> 16) + step
    infinite = np.isinf(x)
    rounded = np.where(infinite, x.astype(np.float32).view(np.uint32) >> 16, rounded)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def f64_to_f16(x: Array, mode: str = "rn") -> Array:
    """Round float64 once to float16."""
    nearest = x.astype(np.float16)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if mode == "rz":
        wrong, toward = np.abs(back) > np.abs(x), np.zeros((), np.float16)
    else:
        wrong = back > x if mode == "rm" else back < x
        toward = np.array(-np.inf if mode == "rm" else np.inf, np.float16)
    return np.where(wrong, np.nextafter(nearest, toward), nearest)


def half_to_f64(bits: Array, kind: str) -> Array:
    """f16 or bf16 bits to float64."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return bf16_to_f32(bits).astype(np.float64)


def f64_to_half(x: Array, kind: str, mode: str = "rn") -> Array:
    """float64 to f16 or bf16 bits, rounded once; NaN is 0x7FFF."""
    if kind == "bf16":
        return f64_to_bf16(x, mode)
    bits = f64_to_f16(x, mode).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def _finish_half(x: Array, kind: str, finish: str) -> Array:
    if finish == "sat":
        saturate(x)
    elif finish == "relu":
        x = np.where(np.isnan(x), x, np.maximum(x, 0.0) + 0.0)
    return f64_to_half(x, kind)


def half_add(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Sum of f16 or bf16 bits: exact in float64 but for bf16 of far exponents, rounded to odd."""
    x, y = half_to_f64(a, kind), half_to_f64(b, kind)
    return _finish_half(_to_odd(x, y, x + y), kind, finish)


def half_sub(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Difference of f16 or bf16 bits."""
    return half_add(a, b ^ np.uint16(0x8000), kind, finish)


def half_mul(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Product of f16 or bf16 bits."""
    return _finish_half(half_to_f64(a, kind) * half_to_f64(b, kind), kind, finish)


def half_fma(a: Array, b: Array, c: Array, kind: str, finish: str) -> Array:
    """a * b + c of f16 or bf16 bits, rounded once."""
    product, z = half_to_f64(a, kind) * half_to_f64(b, kind), half_to_f64(c, kind)
    return _finish_half(_to_odd(product, z, product + z), kind, finish)


def _half_extreme(name: str, nan: bool) -> Callable[[Array, Array, str, str], Array]:
    chosen = float_min if name == "min" else float_max

    def function(a: Array, b: Array, kind: str, finish: str) -> Array:
        x, y = half_to_f64(a, kind), half_to_f64(b, kind)
        out = np.empty_like(x)
        chosen(x, y, out, nan)
        return f64_to_half(out, kind)

    return function


half_min, half_max = _half_extreme("min", False), _half_extreme("max", False)
half_min_nan, half_max_nan = _half_extreme("min", True), _half_extreme("max", True)


def half_unary(function: np.ufunc, a: Array, kind: str) -> Array:
    """A function of f16 or bf16 bits through float64."""
    result: Array = function(half_to_f64(a, kind))
    return f64_to_half(result, kind)


# ---- integers ----


def divide_toward_zero(a: Array, b: Array) -> Array:
    """Signed division that truncates."""
    quotient: Array = np.floor_divide(np.subtract(a, np.fmod(a, b)), b)
    return quotient


def mul_hi_64(a: Array, b: Array) -> Array:
    """The high 64 bits of a 128-bit product, signed or unsigned by dtype."""
    x, y = a.view(np.uint64), np.broadcast_to(b, a.shape).astype(b.dtype).view(np.uint64)
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> s, y & low, y >> s
    middle = x1 * y0 + ((x0 * y0) >> s)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> s) + (other >> s)
    if a.dtype.kind == "i":
        high -= np.where(a < 0, y, np.uint64(0)) + np.where(y.view(np.int64) < 0, x, np.uint64(0))
    return high.view(a.dtype)


def leading_zeros(x: Array) -> Array:
    """Count of leading zero bits."""
    v, bits = x.copy(), 8 * x.dtype.itemsize
    shift = 1
    while shift < bits:
        v |= v >> x.dtype.type(shift)
        shift *= 2
    return bits - np.bitwise_count(v)


def reverse_bits(x: Array) -> Array:
    """brev."""
    bits = 8 * x.dtype.itemsize
    kind = x.dtype.type
    v = x.byteswap()
    for shift, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        m = kind(int.from_bytes(bytes([mask] * (bits // 8)), "little"))
        v = ((v >> kind(shift)) & m) | ((v & m) << kind(shift))
    return v


def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """bfe (PTX ISA 9.7.1.19): fields that reach beyond the word are filled with zero or sign."""
    bits = 8 * a.dtype.itemsize
    unsigned = a.view(f"u{a.dtype.itemsize}")
    at, size = (np.broadcast_to(v & 0xFF, a.shape).astype(np.int64) for v in (position, length))
    last = np.minimum(at + size - 1, bits - 1)
    mask = _ones(np.minimum(size, bits), unsigned.dtype)
    field = (unsigned >> at.astype(unsigned.dtype)) & mask
    if a.dtype.kind == "u":
        return field
    one = unsigned.dtype.type(1)
    sign = ((unsigned >> last.clip(0).astype(unsigned.dtype)) & one).astype(bool) & (size > 0)
    available = np.clip(bits - at, 0, size)
    fill = ~_ones(available, unsigned.dtype)
    return np.where(sign, field | fill, field).view(a.dtype)


def _ones(count: Array, dtype: np.dtype[Any]) -> Array:
    """``count`` (0 to the width) low bits set."""
    full = dtype.type(np.iinfo(dtype).max)
    bits = 8 * dtype.itemsize
    return full >> (bits - count).astype(dtype)


def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: ``length`` low bits of a into b at ``position``."""
    bits = 8 * a.dtype.itemsize
    at, size = (np.broadcast_to(v & 0xFF, a.shape).astype(np.int64) for v in (position, length))
    shift = at.astype(a.dtype)
    mask = _ones(np.minimum(size, bits), a.dtype) << shift
    return (b & ~mask) | ((a << shift) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32, default mode."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(a.shape, np.uint32)
    for at in range(4):
        nibble = (selector >> np.uint32(4 * at)) & np.uint32(15)
        byte = (pair >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint8)
        signs = ((byte >> 7) * np.uint8(255)).astype(np.uint8)
        byte = np.where(nibble & np.uint32(8), signs, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * at)
    return result


def dot_4(a: Array, b: Array, left: type, right: type) -> Array:
    """dp4a without its addend: four byte products, as uint32."""
    x, y = a.view(left).astype(np.int32), b.view(right).astype(np.int32)
    np.multiply(x, y, x)
    total = np.add(x[0::4], x[1::4])
    np.add(total, x[2::4], total)
    np.add(total, x[3::4], total)
    return total.view(np.uint32)


def dot_2(a: Array, b: Array, left: type, right: type, first: int) -> Array:
    """dp2a without its addend: two 16-bit values of a times bytes ``first``, ``first + 1`` of b."""
    wide = {np.uint8: np.uint16, np.int8: np.int16}[left]
    x, y = a.view(wide).astype(np.int32), b.view(right).astype(np.int32)
    return (x[0::2] * y[first::4] + x[1::2] * y[first + 1 :: 4]).view(np.uint32)


# ---- conversions ----


def narrow(x: Array, kind: str, mode: str) -> Array:
    """float64 to the format ``kind`` ("f16", "bf16" as bits, "f32", "f64"), rounded once."""
    if kind == "f64":
        return x
    if kind == "f32":
        return round_to_f32(x, mode)
    if kind == "bf16":
        return f64_to_bf16(x, mode)
    result = f64_to_f16(x, mode)
    canonical_nan(result)
    return result


def canonical_nan(x: Array) -> None:
    """Every NaN of a float16 array becomes 0x7FFF, in place."""
    nan = np.isnan(x)
    if nan.any():
        x[nan] = np.uint16(0x7FFF).view(np.float16)


def relu(x: Array) -> None:
    """Negative values to +0, NaN stays, in place."""
    np.maximum(x, 0.0, out=x)
    np.add(x, 0.0, out=x)


def float_to_integer(x: Array, target: type) -> Array:
    """An integral float64 to an integer type: clamped to its range, NaN to 0."""
    limits = np.iinfo(target)
    clamped = np.minimum(np.maximum(x, float(limits.min)), float(limits.max))
    if limits.bits == 64:
        over = x >= float(limits.max)
        clamped[over] = 0.0
        result = np.where(np.isnan(x), 0.0, clamped).astype(target)
        result[over] = limits.max
        return result
    if np.isnan(clamped).any():
        clamped = np.where(np.isnan(clamped), 0.0, clamped)
    return clamped.astype(target)


def saturate_integer(x: Array, target: type) -> Array:
    """Clamp an integer array to the range of another integer type."""
    limits, own = np.iinfo(target), np.iinfo(x.dtype)
    return np.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(target)
