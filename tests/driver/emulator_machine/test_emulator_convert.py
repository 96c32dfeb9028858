"""cvt and mov against Python integers, fractions, numpy and ml_dtypes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from urdir.driver.emulator.machine.faults import CompileError

Array = np.ndarray[Any, Any]
N = 192
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def numpy_type(kind: str) -> str:
    return f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"


def words(rng: np.random.Generator, kind: str) -> Array:
    raw = rng.integers(0, 1 << 63, N, dtype=np.uint64) >> rng.integers(0, 63, N, dtype=np.uint64)
    raw[:6] = [0, 1, 127, 128, 2**31, 2**32 - 1]
    raw[::2] = ~raw[::2]
    return raw.astype(numpy_type(kind).replace("i", "u")).view(numpy_type(kind))


@pytest.mark.parametrize("origin", INTEGERS)
@pytest.mark.parametrize("to", INTEGERS)
def test_integers(machine: Any, rng: Any, origin: str, to: str) -> None:
    a = words(rng, origin)
    out = numpy_type(to)
    if to[1:] == "8":  # the result fills a 16-bit register
        out = ("i" if to[0] == "s" else "u") + "2"
    exact = np.array(a.tolist(), object)
    bits = int(to[1:])
    wrapped = [v & ((1 << bits) - 1) for v in exact]
    if to[0] == "s":
        wrapped = [v - (1 << bits) if v >> (bits - 1) else v for v in wrapped]
    machine.check(f"cvt.{to}.{origin} %d, %a;", out, np.array(wrapped, out), a)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    least, most = (np.iinfo(a.dtype).min, np.iinfo(a.dtype).max)
    if low <= least and most <= high:
        with pytest.raises(CompileError, match=f"every .{origin} is a .{to}: remove it"):
            machine.evaluate(f"cvt.sat.{to}.{origin} %d, %a;", out, a)
        return
    clamped = np.array([min(max(v, low), high) for v in exact], out)
    machine.check(f"cvt.sat.{to}.{origin} %d, %a;", out, clamped, a)


@pytest.mark.parametrize("origin", INTEGERS)
def test_integer_to_float(machine: Any, rng: Any, origin: str) -> None:
    a = words(rng, origin)
    machine.check(f"cvt.rn.f32.{origin} %d, %a;", "f4", round_integers(a), a)
    machine.check(f"cvt.rn.f64.{origin} %d, %a;", "f8", np.array([float(v) for v in a.tolist()]), a)
    with np.errstate(all="ignore"):
        machine.check(f"cvt.rn.f16.{origin} %d, %a;", "f2", a.astype("f8").astype("f2"), a)
    below = [x if int(x) <= v else np.nextafter(x, np.float32(-np.inf))
             for x, v in zip(round_integers(a), a.tolist(), strict=True)]  # fmt: skip
    machine.check(f"cvt.rm.f32.{origin} %d, %a;", "f4", np.array(below), a)
    machine.check(f"cvt.rz.sat.f32.{origin} %d, %a;", "f4", a > 0, a)


def round_integers(a: Array) -> Array:
    """To 24 bits, ties to even."""
    result = []
    for v in a.tolist():
        drop = max(0, abs(v).bit_length() - 24)
        unit, rest = 1 << drop, abs(v) % (1 << drop)
        whole = abs(v) >> drop
        whole += rest * 2 > unit or (rest * 2 == unit and whole % 2)
        result.append(math.copysign(whole * unit, v))
    return np.array(result, "f4")


@pytest.mark.parametrize("origin", ["f16", "f32", "f64"])
@pytest.mark.parametrize("to", INTEGERS)
def test_float_to_integer(machine: Any, rng: Any, origin: str, to: str) -> None:
    x = rng.standard_normal(N) * 2.0 ** rng.integers(-3, 70, N)
    x[:12] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, np.nan, np.inf, -np.inf, 127.5, -128.5, 255.5]
    with np.errstate(all="ignore"):
        a = x.astype(f"f{int(origin[1:]) // 8}")
    bits = int(to[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    out = numpy_type(to) if bits > 8 else ("i2" if to[0] == "s" else "u2")
    nan = (low or 1 << bits - 1) if origin == "f64" or bits == 64 else 0  # PTX ISA, cvt
    for mode, function in (
        ("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil),
    ):  # fmt: skip
        want = []
        for v in a.astype("f8").tolist():
            if math.isnan(v):
                want.append(nan)
            elif math.isinf(v):
                want.append(high if v > 0 else low)
            else:
                want.append(min(max(function(v), low), high))
        machine.check(f"cvt.{mode}.{to}.{origin} %d, %a;", out, np.array(want, out), a)


def test_rounding_to_integral_floats(machine: Any, rng: Any) -> None:
    a = (rng.standard_normal(N) * 10).astype("f4")
    a[:4] = [0.5, -0.5, 1.5, 2.5]
    for mode, function in (
        ("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil),
    ):  # fmt: skip
        machine.check(f"cvt.{mode}.f32.f32 %d, %a;", "f4", function(a), a)


def wide_floats(rng: np.random.Generator, span: int, dtype: str) -> Array:
    x = rng.standard_normal(N) * 2.0 ** rng.integers(-span, span, N)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, 65519.9, 65520.1]
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def test_widening_is_exact(machine: Any, rng: Any) -> None:
    half = wide_floats(rng, 20, "f2")
    machine.check("cvt.f32.f16 %d, %a;", "f4", half.astype("f4"), half)
    machine.check("cvt.f64.f16 %d, %a;", "f8", half.astype("f8"), half)
    single = wide_floats(rng, 100, "f4")
    machine.check("cvt.f64.f32 %d, %a;", "f8", single.astype("f8"), single)
    brain = wide_floats(rng, 100, "f4").astype(ml_dtypes.bfloat16)
    want = brain.astype("f4")
    machine.check("cvt.f32.bf16 %d, %a;", "f4", want, brain.view("u2"))
    machine.check("cvt.sat.f32.f32 %d, %a;", "f4", np.clip(single, 0, 1) + np.float32(0), single)


def neighbours(x: Array, rounded: Array, mode: str, dtype: Any) -> None:
    """``rounded`` is x in the direction ``mode``, and no closer value is."""
    back = rounded.astype("f8")
    finite = np.isfinite(x)
    if mode == "rz":
        assert (np.abs(back[finite]) <= np.abs(x[finite])).all()
    elif mode == "rm":
        assert (back[finite] <= x[finite]).all()
    else:
        assert (back[finite] >= x[finite]).all()
    toward = {"rz": np.copysign(np.inf, x), "rm": np.full(N, np.inf), "rp": np.full(N, -np.inf)}
    with np.errstate(all="ignore"):
        next_ = np.nextafter(rounded, toward[mode].astype(dtype)).astype("f8")
    inexact = finite & (back != x)
    passed = {"rz": np.abs(next_) > np.abs(x), "rm": next_ > x, "rp": next_ < x}[mode]
    assert passed[inexact].all()


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_narrowing(machine: Any, rng: Any, mode: str) -> None:
    single = wide_floats(rng, 20, "f4")
    got = machine.evaluate(f"cvt.{mode}.f16.f32 %d, %a;", "f2", single)
    neighbours(single.astype("f8"), got, mode, "f2")
    double = wide_floats(rng, 140, "f8")
    got = machine.evaluate(f"cvt.{mode}.f32.f64 %d, %a;", "f4", double)
    neighbours(double, got, mode, "f4")
    got = machine.evaluate(f"cvt.{mode}.bf16.f32 %d, %a;", "u2", single).view(ml_dtypes.bfloat16)
    back = got.astype("f8")
    finite = np.isfinite(single)
    ok = {"rz": np.abs(back) <= np.abs(single), "rm": back <= single, "rp": back >= single}[mode]
    assert ok[finite].all()
    assert (np.abs(back[finite] - single[finite]) <= np.abs(single[finite]) * 2.0**-7).all()


def test_nearest_narrowing(machine: Any, rng: Any) -> None:
    with np.errstate(all="ignore"):
        single = wide_floats(rng, 20, "f4")
        machine.check("cvt.rn.f16.f32 %d, %a;", "f2", single.astype("f2"), single)
        brain = single.astype(ml_dtypes.bfloat16).view("u2")
        machine.check("cvt.rn.bf16.f32 %d, %a;", "u2", brain, single)
        double = wide_floats(rng, 160, "f8")
        machine.check("cvt.rn.f32.f64 %d, %a;", "f4", double.astype("f4"), double)
        machine.check("cvt.rn.f16.f64 %d, %a;", "f2", double.astype("f2"), double)
        relu = np.where(single > 0, single, 0).astype("f2")
    machine.check("cvt.rn.relu.f16.f32 %d, %a;", "f2", relu, single)


def test_ties_to_even_of_brain_floats(machine: Any) -> None:
    bits = np.resize(
        np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x00008000], "u4"), N
    )
    want = np.resize(np.array([0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x0000], "u2"), N)
    machine.check("cvt.rn.bf16.f32 %d, %a;", "u2", want, bits.view("f4"))


def test_not_a_number_is_canonical(machine: Any) -> None:
    a = np.full(N, np.nan, "f4")
    machine.check("cvt.rn.f16.f32 %d, %a;", "u2", np.full(N, 0x7FFF), a)
    machine.check("cvt.rn.bf16.f32 %d, %a;", "u2", np.full(N, 0x7FFF), a)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_narrowing(machine: Any, rng: Any, kind: str) -> None:
    a, b = wide_floats(rng, 10, "f4"), wide_floats(rng, 10, "f4")
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        high, low = (x.astype(dtype).view("u2").astype("u4") for x in (a, b))
    machine.check(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", "u4", high << 16 | low, a, b)


def test_packed_narrowing_to_eight_bits(machine: Any, rng: Any) -> None:
    """To the nearest, ties to even, the largest instead of more; any NaN is 0x7F."""
    near = np.arange(-500, 500, 0.5).astype("f4") / np.float32(8)
    a, b = wide_floats(rng, 10, "f4"), np.resize(near, N)
    bytes_of = []
    for x in (a, b):
        with np.errstate(all="ignore"):
            rounded = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view("u1")
        bytes_of.append(np.where(np.isnan(x), 0x7F, rounded).astype("u4"))
    code = "cvt.rn.satfinite.e4m3x2.f32 %h, %a, %b; cvt.u32.u16 %d, %h;"
    machine = replace(machine, version="8.1")
    machine.check(code, "u4", bytes_of[0] << 8 | bytes_of[1], a, b)
    both = rng.integers(0, 1 << 16, N).astype("u4")
    both[both & 0x7F == 0x7F] = 0  # no NaN, whose bits are not said
    both[both >> 8 & 0x7F == 0x7F] = 0
    halves = both.astype("u2").view(ml_dtypes.float8_e4m3fn).astype(np.float16).view("u4")
    machine.check("cvt.u16.u32 %h, %a; cvt.rn.f16x2.e4m3x2 %d, %h;", "u4", halves, both)


def test_move_packs_and_unpacks(machine: Any, rng: Any) -> None:
    a, b = (rng.integers(0, 1 << 32, N, dtype=np.uint64).astype("u4") for _ in range(2))
    want = a.astype("u8") | b.astype("u8") << np.uint64(32)
    machine.check("mov.b64 %d, {%a, %b};", "u8", want, a, b)
    machine.check("mov.b64 {%x, %y}, %a; xor.b32 %d, %x, %y;", "u4", a ^ b, want)
    machine.check("mov.b64 {_, %d}, %a;", "u4", b, want)
    machine.check("mov.b32 {%h, %g2}, %a; mov.b32 %d, {%g2, %h};", "u4", a << 16 | a >> 16, a)
    machine.check("mov.b32 %d, %a; mov.f32 %t, %d; mov.b32 %d, %t;", "u4", a, a)


def test_narrow_sources_are_low_parts(machine: Any, rng: Any) -> None:
    a = rng.integers(0, 1 << 32, N, dtype=np.uint64).astype("u4")
    machine.check("cvt.u32.u8 %d, %a;", "u4", a & 0xFF, a)
    machine.check("cvt.s32.s8 %d, %a;", "i4", a.astype("u1").view("i1"), a)
    machine.check("cvt.u32.u16 %d, %a;", "u4", a & 0xFFFF, a)
    machine.check("cvt.rn.f32.u8 %d, %a;", "f4", (a & 0xFF).astype("f4"), a)
