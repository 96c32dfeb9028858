"""Floating-point instructions against exact rational arithmetic and numpy float64."""

from __future__ import annotations

import math
import operator
import struct
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

Array = np.ndarray[Any, Any]
N = 192
EDGES = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 2.0**-127,
         3.4028234e38, 65504.0, 0.5, 1.5, 2.5)  # fmt: skip


def floats(
    rng: np.random.Generator, dtype: str = "f4", span: int = 40, finite: bool = False
) -> Array:
    x = rng.standard_normal(N) * 2.0 ** rng.integers(-span, span, N)
    if not finite:
        x[: len(EDGES)] = EDGES
        rng.shuffle(x)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def round_fraction(x: Fraction, mode: str = "rn", bits: int = 24, low: int = -149) -> float:
    """A rational to the nearest (or directed) number of ``bits`` and least exponent ``low``."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** exponent > x:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= x:
        exponent += 1
    unit = Fraction(2) ** max(exponent - bits + 1, low)
    whole, rest = divmod(x, unit)
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1),
        "rz": False,
        "rm": sign < 0 and rest > 0,
        "rp": sign > 0 and rest > 0,
    }[mode]
    result = sign * (whole + up) * unit
    limit = (2 - Fraction(1, 2 ** (bits - 1))) * Fraction(2) ** (127 if bits != 11 else 15)
    if abs(result) > limit:
        toward = mode == "rz" or ((mode == "rm") == (sign > 0) and mode != "rn")
        return sign * (float(limit) if toward else math.inf)
    return float(result)


def exact(function: Any, mode: str, *inputs: Array) -> Array:
    """Rounded rational results where everything is finite, else numpy's."""
    out = []
    for row in zip(*(x.tolist() for x in inputs), strict=True):
        value = function(*(Fraction(v) for v in row))
        out.append(round_fraction(value, mode))
    return np.array(out, "f4")


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_arithmetic(machine: Any, rng: Any, name: str, kind: str) -> None:
    dtype = f"f{int(kind[1:]) // 8}"
    a, b = floats(rng, dtype), floats(rng, dtype)
    with np.errstate(all="ignore"):
        want = {"add": a + b, "sub": a - b, "mul": a * b}[name]
    machine.check(f"{name}.{kind} %d, %a, %b;", dtype, want, a, b)
    machine.check(f"{name}.rn.{kind} %d, %a, %b;", dtype, want, a, b)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("span", [6, 70])
def test_directed_rounding(machine: Any, rng: Any, mode: str, span: int) -> None:
    a, b, c = (floats(rng, "f4", span, finite=True) for _ in range(3))
    for code, function, inputs in (
        (f"add.{mode}.f32 %d, %a, %b;", lambda x, y: x + y, (a, b)),
        (f"sub.{mode}.f32 %d, %a, %b;", lambda x, y: x - y, (a, b)),
        (f"mul.{mode}.f32 %d, %a, %b;", lambda x, y: x * y, (a, b)),
        (f"div.{mode}.f32 %d, %a, %b;", lambda x, y: x / y, (a, b)),
        (f"fma.{mode}.f32 %d, %a, %b, %c;", lambda x, y, z: x * y + z, (a, b, c)),
    ):
        machine.check(code, "f4", exact(function, mode, *inputs), *inputs)


@pytest.mark.parametrize("span", [3, 12, 80])
def test_fma_is_rounded_once(machine: Any, rng: Any, span: int) -> None:
    a, b, c = (floats(rng, "f4", span, finite=True) for _ in range(3))
    c[::4] = -(a[::4].astype("f8") * b[::4]).astype("f4")
    want = exact(lambda x, y, z: x * y + z, "rn", a, b, c)
    machine.check("fma.rn.f32 %d, %a, %b, %c;", "f4", want, a, b, c)
    machine.check("mov.f32 %d, %c; fma.rn.f32 %d, %a, %b, %d;", "f4", want, a, b, c)


def test_fma_on_midpoints(machine: Any) -> None:
    """The float64 sum is a midpoint of two float32 only because it was rounded."""
    a = np.full(N, np.float32(1 + 2**-12), "f4")
    b = np.full(N, np.float32(1 + 2**-12), "f4")
    # 1 + 2^-11 + 2^-24 is a midpoint; far smaller addends decide
    c = np.resize(np.array([2.0**-60, -(2.0**-60), 0.0, 2.0**-140, -(2.0**-140)], "f4"), N)
    want = exact(lambda x, y, z: x * y + z, "rn", a, b, c)
    assert np.unique(want).size == 2
    machine.check("fma.rn.f32 %d, %a, %b, %c;", "f4", want, a, b, c)


def test_fma_on_subnormal_midpoints(machine: Any) -> None:
    """x * y has a tail below every bit that float64 keeps of the sum."""
    a = np.resize(np.array([2.0**-75 * (1 + 2**-23), 2.0**-76 * (1 - 2**-24)], "f4"), N)
    b = np.resize(np.array([2.0**-75 * (1 - 2**-23), 2.0**-74], "f4"), N)
    c = np.resize(np.array([2.0**-126, 2.0**-127, -(2.0**-130), 3 * 2.0**-149], "f4"), N)
    want = exact(lambda x, y, z: x * y + z, "rn", a, b, c)
    machine.check("fma.rn.f32 %d, %a, %b, %c;", "f4", want, a, b, c)


#: Operands of fma instructions in a row: a chain longer than a call takes, two accumulators,
#: addends that are results, products of a result, and factors that are overwritten.
RUNS = (
    "dabd dbcd dcad dabd dbbd dccd daad dabd dbcd dacd",
    "tabc dabd tcbt dcat tact dbbd",
    "tabc dcbt dtad tbbd dact",
    "dabd abcd tabc bbct dabt",
)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["any", "midpoints", "subnormal", "wide", "both"])
def test_runs_of_fma_are_rounded_one_by_one(machine: Any, rng: Any, run: str, kind: str) -> None:
    a, b, c = (floats(rng, "f4", 3, finite=True) for _ in range(3))
    if kind == "midpoints":  # most sums are exact; of one in four rounding twice goes wrong
        a[:], b[:] = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
        c[:] = np.resize(np.array([2.0**-60, -(2.0**-60), 0.5, 0.0], "f4"), N)
    elif kind == "subnormal":
        a, b, c = (x * y for x, y in ((a, 2.0**-75), (b, 2.0**-74), (c, 2.0**-126)))
        a, b, c = (x.astype("f4") for x in (a, b, c))
    elif kind == "both":  # just below a midpoint, where the even neighbour is above
        a[:], b[:] = 2.0**-75 * (1 + 2**-23), 2.0**-75 * (1 - 2**-23)
        c[:] = np.resize(np.array([2.0**-127 + 2.0**-149, 3 * 2.0**-149], "f4"), N)
    elif kind == "wide":  # more lanes than a call takes
        a, b, c = (np.resize(x, 64 * 67) for x in (a, b, c))
    values = {"a": a, "b": b, "c": c, "d": c, "t": c}
    code = ["mov.f32 %d, %c", "mov.f32 %t, %c"]
    for d, x, y, z in run.split():
        operands = (values[x][:N], values[y][:N], values[z][:N])
        values[d] = exact(lambda x, y, z: x * y + z, "rn", *operands)
        code.append(f"fma.rn.f32 %{d}, %{x}, %{y}, %{z}")
    want = np.resize(values["d"].astype("f4"), a.size)
    machine.check("; ".join(code) + ";", "f4", want, a, b, c)


def test_runs_of_fma_are_one_call(machine: Any) -> None:
    """None has a factor that it has written, nor more than eight instructions."""
    chain, other = "fma.rn.f32 %d, %a, %b, %d;", "fma.rn.f32 %a, %d, %b, %c;"
    body = f".reg .f32 %a, %b, %c, %d; {3 * chain} {other} mov.f32 %b, %c; {11 * chain} ret;"
    function = machine.compile(body).whole[0]
    calls = [line for line in function.parts if "fma" in line]
    (d,) = (own for own, name in function.names.items() if name == "r3_f4")
    assert [line.count(f"{d}, {d})") for line in calls] == [3, 0, 8, 3]


def test_fma_of_specials(machine: Any, rng: Any) -> None:
    a, b, c = (floats(rng) for _ in range(3))
    a[:4], b[:4], c[:4] = (np.inf, 0, np.inf, 2e38), (0, np.inf, 1, 2e38), (1, 1, -np.inf, -np.inf)
    got = machine.evaluate("fma.rn.f32 %d, %a, %b, %c;", "f4", a, b, c)
    with np.errstate(all="ignore"):
        plain = (a.astype("f8") * b + c).astype("f4")
    unusual = ~np.isfinite(plain)
    assert unusual.sum() > 10
    np.testing.assert_array_equal(got[unusual], plain[unusual])


def test_fma_f64(machine: Any, rng: Any) -> None:
    a, b = floats(rng, "f8", finite=True), floats(rng, "f8", finite=True)
    c = -(a * b)
    want = [
        float(Fraction(x) * Fraction(y) + Fraction(z))
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    machine.check("fma.rn.f64 %d, %a, %b, %c;", "f8", np.array(want), a, b, c)


def flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def test_flush_and_saturate(machine: Any, rng: Any) -> None:
    a, b = floats(rng, span=75), floats(rng, span=75)
    a[:8] = 2.0**-130
    with np.errstate(all="ignore"):
        product = flushed(flushed(a) * flushed(b))
        machine.check("mul.ftz.f32 %d, %a, %b;", "f4", product, a, b)
        total = flushed(flushed(a) + flushed(b))
        machine.check("add.ftz.f32 %d, %a, %b;", "f4", total, a, b)
        plain = a + b
    sat = np.where(np.isnan(plain), 0, np.clip(plain, 0, 1)) + np.float32(0)
    machine.check("add.sat.f32 %d, %a, %b;", "f4", sat, a, b)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_min_max(machine: Any, rng: Any, kind: str) -> None:
    dtype = f"f{int(kind[1:]) // 8}"
    a, b = floats(rng, dtype), floats(rng, dtype)
    a[:4], b[:4] = (0.0, -0.0, np.nan, 1.0), (-0.0, 0.0, 3.0, np.nan)

    def pick(x: float, y: float, largest: bool) -> float:
        if math.isnan(x) or math.isnan(y):
            return y if math.isnan(x) else x
        key = (x, math.copysign(1, x)), (y, math.copysign(1, y))
        return max(key)[0] if largest else min(key)[0]

    for name in ("min", "max"):
        want = [pick(x, y, name == "max") for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        got = machine.evaluate(f"{name}.{kind} %d, %a, %b;", dtype, a, b)
        both = np.isnan(a) & np.isnan(b)
        assert np.isnan(got[both]).all()
        bits = f"u{got.itemsize}"
        expected = np.array(want, dtype)
        assert (got.view(bits) == expected.view(bits))[~both].all()
    nan = np.isnan(a) | np.isnan(b)
    if kind == "f32":
        got = machine.evaluate("max.NaN.f32 %d, %a, %b;", dtype, a, b)
        assert np.isnan(got[nan]).all()
        assert not np.isnan(got[~nan]).any()


def test_division_and_roots(machine: Any, rng: Any) -> None:
    a, b = floats(rng), floats(rng)
    with np.errstate(all="ignore"):
        machine.check("div.rn.f32 %d, %a, %b;", "f4", a / b, a, b)
        machine.check("rcp.rn.f32 %d, %a;", "f4", np.float32(1) / a, a)
        root = np.array([math.sqrt(x) if x >= 0 else math.nan for x in a.tolist()], "f4")
    positive = np.abs(a)
    machine.check("sqrt.rn.f32 %d, %a;", "f4", np.sqrt(positive.astype("f8")), positive)
    assert np.isnan(machine.evaluate("sqrt.rn.f32 %d, %a;", "f4", a)).sum() == np.isnan(root).sum()
    wide = floats(rng, "f8")
    with np.errstate(all="ignore"):
        machine.check("div.rn.f64 %d, %a, %a;", "f8", wide / wide, wide)
        machine.check("rcp.rn.f64 %d, %a;", "f8", 1 / wide, wide)
        machine.check("sqrt.rn.f64 %d, %a;", "f8", np.sqrt(np.abs(wide)), np.abs(wide))


# Largest relative error that the PTX ISA states (absolute for sin, cos and lg2 near 1).
@pytest.mark.parametrize(
    ("code", "function", "low", "high", "relative"),
    [
        ("ex2.approx.f32", np.exp2, -120, 120, 2**-22),
        ("ex2.approx.ftz.f32", np.exp2, -20, 20, 2**-22),
        ("lg2.approx.f32", np.log2, 2, 1e30, 2**-22),
        ("sin.approx.f32", np.sin, 0.1, 3.0, 2**-20),
        ("cos.approx.f32", np.cos, 0.1, 1.4, 2**-20),
        ("tanh.approx.f32", np.tanh, -8, 8, 2**-11),
        ("rcp.approx.f32", lambda x: 1 / x, 1e-3, 1e6, 2**-23),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 1e-3, 1e6, 2**-23),
        ("sqrt.approx.f32", np.sqrt, 0, 1e9, 2**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-9, 1e9, 2**-22),
    ],
)  # fmt: skip
def test_approximate(
    machine: Any, rng: Any, code: str, function: Any, low: float, high: float, relative: float
) -> None:
    a = rng.uniform(low, high, N).astype("f4")
    got = machine.evaluate(f"{code} %d, %a;", "f4", a).astype("f8")
    np.testing.assert_allclose(got, function(a.astype("f8")), rtol=relative)


def test_approximate_division(machine: Any, rng: Any) -> None:
    a, b = floats(rng, finite=True), floats(rng, finite=True)
    for code in ("div.full.f32", "div.approx.f32", "div.approx.ftz.f32"):
        got = machine.evaluate(f"{code} %d, %a, %b;", "f4", a, b)
        np.testing.assert_allclose(got, a.astype("f8") / b, rtol=2**-22)


def test_special_values_of_functions(machine: Any) -> None:
    x = np.resize(np.array([np.inf, -np.inf, 0.0, -0.0, np.nan, 200.0, -200.0, -1.0], "f4"), N)
    inf, nan = np.inf, np.nan
    for code, want in (
        ("ex2.approx.f32", [inf, 0, 1, 1, nan, inf, 0, 0.5]),
        ("lg2.approx.f32", [inf, nan, -inf, -inf, nan, np.log2(200), nan, nan]),
        ("rcp.approx.f32", [0, -0.0, inf, -inf, nan, 1 / 200, -1 / 200, -1]),
        ("rsqrt.approx.f32", [0, nan, inf, -inf, nan, 1 / np.sqrt(200), nan, nan]),
    ):
        got = machine.evaluate(f"{code} %d, %a;", "f4", x)[:8]
        np.testing.assert_allclose(got, np.array(want), rtol=1e-6)


def test_sign_operations(machine: Any, rng: Any) -> None:
    a, b = floats(rng), floats(rng)
    machine.check("neg.f32 %d, %a;", "u4", a.view("u4") ^ 0x80000000, a)
    machine.check("abs.f32 %d, %a;", "u4", a.view("u4") & 0x7FFFFFFF, a)
    sign = (b.view("u4") & 0x7FFFFFFF) | (a.view("u4") & 0x80000000)
    machine.check("copysign.f32 %d, %a, %b;", "u4", sign, a, b)


ORDERED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_comparisons(machine: Any, rng: Any, kind: str) -> None:
    dtype = f"f{int(kind[1:]) // 8}"
    a, b = floats(rng, dtype), floats(rng, dtype)
    a[::3] = b[::3]
    a[:2] = np.nan
    nan = np.isnan(a) | np.isnan(b)
    table = dict(ORDERED.items())
    expected = {name: f(a, b) for name, f in table.items()}
    expected["ne"] = (a != b) & ~nan
    expected |= {f"{name}u": want | nan for name, want in expected.items()}
    expected |= {"num": ~nan, "nan": nan}
    for name, want in expected.items():
        code = f"setp.{name}.{kind} %p, %a, %b; selp.b32 %d, 1, 0, %p;"
        machine.check(code, "u4", want, a, b)


def test_testp(machine: Any, rng: Any) -> None:
    a = floats(rng, span=75)
    size = np.abs(a)
    for name, want in (
        ("finite", np.isfinite(a)), ("infinite", np.isinf(a)), ("number", ~np.isnan(a)),
        ("notanumber", np.isnan(a)), ("subnormal", (size < 2.0**-126) & (a != 0)),
        ("normal", np.isfinite(a) & ((size >= 2.0**-126) | (a == 0))),
    ):  # fmt: skip
        machine.check(f"testp.{name}.f32 %p, %a; selp.b32 %d, 1, 0, %p;", "u4", want, a)


def halves(rng: np.random.Generator, kind: str) -> Array:
    x = rng.standard_normal(N) * 2.0 ** rng.integers(-12, 12, N)
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        return x.astype(dtype).view("u2")


def half_exact(kind: str, function: Any, *inputs: Array) -> Array:
    """One rounding of the exact result."""
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    bits, low = (11, -24) if kind == "f16" else (8, -133)
    rows = zip(*(x.view(dtype).astype("f8").tolist() for x in inputs), strict=True)
    rounded = [round_fraction(function(*map(Fraction, row)), bits=bits, low=low) for row in rows]
    return np.array(rounded).astype(dtype).view("u2")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_arithmetic(machine: Any, rng: Any, kind: str) -> None:
    a, b, c = (halves(rng, kind) for _ in range(3))
    for name, function in (
        ("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul", lambda x, y: x * y),
    ):  # fmt: skip
        want = half_exact(kind, function, a, b)
        want = np.where((want & 0x7FFF) == 0, want & 0x8000, want)
        got = machine.evaluate(f"{name}.{kind} %d, %a, %b;", "u2", a, b)
        assert ((got == want) | ((got | want) & 0x7FFF == 0)).all(), name
    want = half_exact(kind, lambda x, y, z: x * y + z, a, b, c)
    machine.check(f"fma.rn.{kind} %d, %a, %b, %c;", "u2", want, a, b, c)
    machine.check(f"neg.{kind} %d, %a;", "u2", a ^ 0x8000, a)
    machine.check(f"abs.{kind} %d, %a;", "u2", a & 0x7FFF, a)
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    smaller = np.where(a.view(dtype).astype("f8") < b.view(dtype).astype("f8"), a, b)
    machine.check(f"min.{kind} %d, %a, %b;", "u2", smaller, a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves(machine: Any, rng: Any, kind: str) -> None:
    a, b, c = (
        np.ascontiguousarray(np.stack([halves(rng, kind), halves(rng, kind)], 1)).view("u4")[:, 0]
        for _ in range(3)
    )
    want = half_exact(kind, lambda x, y, z: x * y + z, *(v.copy().view("u2") for v in (a, b, c)))
    machine.check(f"fma.rn.{kind}x2 %d, %a, %b, %c;", "u4", want.view("u4"), a, b, c)
    machine.check(f"neg.{kind}x2 %d, %a;", "u4", a ^ 0x80008000, a)


def test_flushed_halves_and_comparisons(machine: Any, rng: Any) -> None:
    """.ftz of f16, and of operands of setp, set and slct."""
    a, b = (rng.integers(0, 1 << 16, N, dtype=np.uint16) & 0x87FF for _ in range(2))
    x, y = (np.where(h & 0x7C00, h, h & 0x8000).astype("u2").view("f2") for h in (a, b))
    machine.check("neg.ftz.f16 %d, %a;", "u2", (-x).view("u2"), a)
    for name, want in (("add", x + y), ("mul", x * y)):
        flushed_result = np.where(np.abs(want) < np.float16(2.0**-14), np.copysign(0, want), want)
        machine.check(
            f"{name}.ftz.f16 %d, %a, %b;", "u2", flushed_result.astype("f2").view("u2"), a, b
        )
    v, w = (rng.integers(0, 4, N).astype("f4") * np.float32(2.0**-128) for _ in range(2))
    v[::2] *= -1
    code = "setp.lt.ftz.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;"
    machine.check(code, "u4", flushed(v) < flushed(w), v, w)
    machine.check("set.ne.ftz.u32.f32 %d, %a, %b;", "u4", np.zeros(N), v, w)
    ones = np.ones(N, "u4")
    machine.check("slct.ftz.u32.f32 %d, %b, 7, %a;", "u4", ones, v, ones)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_f64(machine: Any, rng: Any, mode: str) -> None:
    """add, sub, mul of f64 and 64-bit integers as floats: the neighbour of the exact number."""
    a, b = (rng.standard_normal(N) * 2.0 ** rng.integers(-40, 40, N) for _ in range(2))
    a[:6] = [1e308, -1e308, 5e-324, 0.0, 1.5, -1.5]
    b[:6] = [1e308, -1e308, -5e-324, -0.0, 1.5, 1.5]
    pairs = [tuple(map(Fraction, pair)) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    for name, function in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
        got = machine.evaluate(f"{name}.{mode}.f64 %d, %a, %b;", "f8", a, b)
        for exact, result in zip((function(*pair) for pair in pairs), got.tolist(), strict=True):
            assert is_neighbour(exact, result, mode), (name, exact, result)
    assert np.signbit(machine.evaluate("sub.rm.f64 %d, %a, %a;", "f8", a)).all()
    words = rng.integers(-(2**63), 2**63, N) >> rng.integers(0, 60, N)
    got = machine.evaluate(f"cvt.{mode}.f64.s64 %d, %a;", "f8", words)
    for exact, result in zip(words.tolist(), got.tolist(), strict=True):
        assert is_neighbour(Fraction(exact), result, mode), (exact, result)


def is_neighbour(exact: Fraction, result: float, mode: str) -> bool:
    """Whether no float lies between an exact number and its rounded one, in the direction."""
    down = mode == "rm" or (mode == "rz" and exact > 0)
    beyond = math.nextafter(result, math.inf if down else -math.inf)
    return result <= exact < beyond if down else beyond < exact <= result


def test_immediates(machine: Any, rng: Any) -> None:
    a = floats(rng, finite=True)
    bits = struct.unpack("<I", struct.pack("<f", 0.1))[0]
    machine.check(f"mul.f32 %d, %a, 0f{bits:08X};", "f4", a * np.float32(0.1), a)
    machine.check("add.f32 %d, %a, 0fBF800000;", "f4", a - np.float32(1), a)
