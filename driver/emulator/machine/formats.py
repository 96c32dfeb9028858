"""Conversions between formats, and arithmetic in half precision (f16, bf16 as bits)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.arithmetic import (
    float_max,
    float_min,
    round_directed,
    round_to_f32,
    saturate,
    to_odd,
)

Array = npt.NDArray[Any]


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bits to float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@functools.cache
def _e4m3_values() -> Array:
    """The value of each byte as E4M3, (256,) float32."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    sizes = np.ldexp(
        np.where(exponent, 8 + mantissa, mantissa).astype(np.float64), np.maximum(exponent, 1) - 10
    )
    sizes[byte & 127 == 127] = np.nan
    values: Array = np.where(byte < 128, sizes, -sizes).astype(np.float32)
    return values


def e4m3_to_f32(bits: Array) -> Array:
    """E4M3 bytes to float32, exact."""
    values: Array = _e4m3_values()[bits]
    return values


def f64_to_e4m3(x: Array) -> Array:
    """Round float64 once to E4M3 bytes, to even; the largest beyond it, NaN is 0x7F."""
    sizes = _e4m3_values()[:127].astype(np.float64)
    between = (sizes[1:] + sizes[:-1]) / 2
    found = np.searchsorted(between, np.abs(x))
    ties = between[np.minimum(found, 125)] == np.abs(x)
    found += ties & (found % 2 == 1)
    found = np.where(np.isnan(x), 127, found + 128 * np.signbit(x))
    return found.astype(np.uint8)


def f64_to_bf16(x: Array, mode: str = "rn") -> Array:
    """Round float64 once to bf16 bits; NaN is 0x7FFF."""
    up = x.astype(np.float32)
    if mode == "rn":
        # to odd in float32 first, so that the second rounding cannot go wrong
        down = round_directed(x, "rz")
        inexact = (down.astype(np.float64) != x) & np.isfinite(x)
        bits = down.view(np.uint32) | inexact.astype(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        bits = round_directed(x, mode).view(np.uint32)
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


def f64_to_half(x: Array, kind: str) -> Array:
    """float64 to f16 or bf16 bits, rounded once; NaN is 0x7FFF."""
    if kind == "bf16":
        return f64_to_bf16(x)
    half = f64_to_f16(x)
    canonical_nan(half)
    return half.view(np.uint16)


def _finish_half(x: Array, kind: str, finish: str) -> Array:
    if finish == "sat":
        saturate(x)
    elif finish == "relu":
        x = np.where(np.isnan(x), x, np.maximum(x, 0.0) + 0.0)
    return f64_to_half(x, kind)


def half_flush(bits: Array) -> Array:
    """f16 bits: subnormals to zero of their sign (.ftz)."""
    return np.where(bits & 0x7C00, bits, bits & 0x8000)


def half_add(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Sum of f16 or bf16 bits: exact in float64, except bf16 with distant exponents."""
    return _half_sum(half_to_f64(a, kind), half_to_f64(b, kind), kind, finish)


def half_sub(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Difference of f16 or bf16 bits."""
    return half_add(a, b ^ np.uint16(0x8000), kind, finish)


def half_mul(a: Array, b: Array, kind: str, finish: str) -> Array:
    """Product of f16 or bf16 bits."""
    return _finish_half(half_to_f64(a, kind) * half_to_f64(b, kind), kind, finish)


def half_fma(a: Array, b: Array, c: Array, kind: str, finish: str) -> Array:
    """a * b + c of f16 or bf16 bits, rounded once."""
    product = half_to_f64(a, kind) * half_to_f64(b, kind)
    return _half_sum(product, half_to_f64(c, kind), kind, finish)


def _half_sum(x: Array, y: Array, kind: str, finish: str) -> Array:
    """x + y, rounded once: y of f16 or bf16, x of them or an exact product.

    A finite f16 sum that is inexact in float64 has an x of less than 2**-30 of y: it rounds to y,
    and no midpoint of two f16 is near. One of bf16, with more exponents, is rounded to odd.
    """
    total = x + y
    return _finish_half(total if kind == "f16" else to_odd(x, y, total), kind, finish)


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


def float_to_integer(x: Array, target: type, has_64: bool) -> Array:
    """An integral float64 to an integer type: clamped to its range.

    NaN becomes 0, or if source or target have 64 bits only the highest bit (PTX ISA, cvt).
    """
    limits = np.iinfo(target)
    nan = (limits.min or (limits.max >> 1) + 1) if has_64 else 0
    clamped = np.minimum(np.maximum(x, float(limits.min)), float(limits.max))
    unordered = np.isnan(clamped)
    if limits.bits == 64:
        over = x >= float(limits.max)
        clamped[over | unordered] = 0.0
        result: Array = clamped.astype(target)
        result[over] = limits.max
        result[unordered] = nan
        return result
    if unordered.any():
        clamped = np.where(unordered, float(nan), clamped)
    return clamped.astype(target)


def saturate_integer(x: Array, target: type) -> Array:
    """Clamp an integer array to the range of another integer type."""
    limits, own = np.iinfo(target), np.iinfo(x.dtype)
    return np.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(target)
