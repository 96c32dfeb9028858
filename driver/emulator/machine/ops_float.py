"""Floating-point instructions (PTX ISA 9.7.3 to 9.7.5).

f32 and f64 arithmetic rounds to nearest as numpy does; the approximate functions are computed in
float64 and rounded once, which lies inside the error that the ISA allows them. f16 operations
round the float32 result of two halves, which is the correctly rounded one (fma goes through
float64); bf16 likewise.
"""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation

_UFUNC = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}


def _input(e: Emitter, at: int, element: str, flush: bool) -> str:
    name = e.source(e.operands[at], element)
    if not flush:
        return name
    flushed = e.temp(element)
    e.line(f"{flushed}[...] = flush({name})")
    return flushed


def _finish(e: Emitter, result: str, flush: bool, saturate: bool) -> None:
    if flush:
        e.line(f"{result}[...] = flush({result})")
    if saturate:
        e.line(f"saturate({result})")


@operation(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?(\.ftz)?(\.sat)?\.(f32)", "=f32 f32 f32")
@operation(r"(add|sub|mul)(?:\.(rn|rz|rm|rp))?()()\.(f64)", "=f64 f64 f64")
def _arithmetic(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[5]]
    ftz = bool(m[3])
    a, b = _input(e, 1, element, ftz), _input(e, 2, element, ftz)
    result = e.target(e.operands[0], element)
    if m[2] in (None, "rn"):
        e.line(f"{_UFUNC[m[1]]}({a}, {b}, {result})")
    elif element == "f4":
        e.line(f"{result}[...] = {m[1]}_directed({a}, {b}, {m[2]!r})")
    else:
        e.line(f"{result}[...] = directed_64({m[1]!r}, {a}, {b}, {m[2]!r})")
    _finish(e, result, ftz, bool(m[4]))


@operation(r"(fma|mad)\.(rn|rz|rm|rp)(\.ftz)?(\.sat)?\.f32", "=f32 f32 f32 f32")
def _fma(e: Emitter, m: re.Match[str]) -> None:
    ftz = bool(m[3])
    a, b, c = (_input(e, i, "f4", ftz) for i in (1, 2, 3))
    scratch, bits = f"({e.temp('f8')}, {e.temp('f8')}, {e.temp('f8')})", e.temp("i8")
    result = e.target(e.operands[0], "f4")
    if m[2] == "rn":
        e.line(f"fma_32({a}, {b}, {c}, {result}, {scratch}, {bits})")
    else:
        e.line(f"{result}[...] = fma_directed({a}, {b}, {c}, {m[2]!r})")
    _finish(e, result, ftz, bool(m[4]))


@operation(r"(fma|mad)\.rn\.f64", "=f64 f64 f64 f64")
def _fma_64(e: Emitter, m: re.Match[str]) -> None:
    a, b, c = (e.full(o, "f8") for o in e.operands[1:])
    e.line(f"{e.target(e.operands[0], 'f8')}[...] = fma_64({a}, {b}, {c})")


@operation(r"(neg|abs)(\.ftz)?\.(f32)", "={3} {3}")
@operation(r"(neg|abs)()\.(f64)", "={3} {3}")
@operation(r"(neg)(\.ftz)?\.(f16)", "={3} {3}", 53, (6, 0))
@operation(r"(abs)(\.ftz)?\.(f16)", "={3} {3}", 53, (6, 5))
def _sign(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[3]]
    a = _input(e, 1, element, bool(m[2]))
    name = {"neg": "negative", "abs": "absolute"}[m[1]]
    e.line(f"{name}({a}, {e.target(e.operands[0], element)})")


@operation(r"(neg)\.(f16x2)", "={2} {2}", 53, (6, 0))
@operation(r"(abs)\.(f16x2)", "={2} {2}", 53, (6, 5))
@operation(r"(neg|abs)\.(bf16|bf16x2)", "={2} {2}", 80, (7, 0))
def _sign_bits(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[2]]
    sign = 0x8000 if element == "u2" else 0x80008000
    a = e.source(e.operands[1], element)
    result = e.target(e.operands[0], element)
    if m[1] == "neg":
        e.line(f"bitwise_xor({a}, {e.constant(sign, element)}, {result})")
    else:
        e.line(f"bitwise_and({a}, {e.constant(~sign, element)}, {result})")


@operation(r"(min|max)(\.ftz)?()\.(f32)", "={4} {4} {4}")
@operation(r"(min|max)(\.ftz)?(\.NaN)\.(f32)", "={4} {4} {4}", 80, (7, 0))
@operation(r"(min|max)()()\.(f64)", "={4} {4} {4}")
@operation(r"(min|max)(\.ftz)?(\.NaN)?\.(f16)", "={4} {4} {4}", 80, (7, 0))
def _minimum(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[4]]
    a, b = (_input(e, i, element, bool(m[2])) for i in (1, 2))
    result = e.target(e.operands[0], element, e.operands[1:])
    e.line(f"float_{m[1]}({a}, {b}, {result}, {bool(m[3])})")


@operation(r"div\.(rn|rz|rm|rp|full|approx)(\.ftz)?\.(f32)", "=f32 f32 f32")
@operation(r"div\.(rn)()\.(f64)", "=f64 f64 f64")
def _div(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[3]]
    ftz = bool(m[2])
    a, b = _input(e, 1, element, ftz), _input(e, 2, element, ftz)
    result = e.target(e.operands[0], element)
    if m[1] in ("rz", "rm", "rp"):
        e.line(f"{result}[...] = div_directed({a}, {b}, {m[1]!r})")
    else:
        e.line(f"divide({a}, {b}, {result})")
    _finish(e, result, ftz, False)


@operation(r"(rcp|sqrt)\.(rn|approx)(\.ftz)?\.(f32)", "=f32 f32")
@operation(r"(rcp|sqrt)\.(rn)()\.(f64)", "=f64 f64")
def _reciprocal(e: Emitter, m: re.Match[str]) -> None:
    name, ftz, element = m[1], bool(m[3]), NUMPY[m[4]]
    a = _input(e, 1, element, ftz)
    result = e.target(e.operands[0], element)
    if name == "sqrt":
        e.line(f"sqrt({a}, {result})")
    else:
        e.line(f"divide({e.constant(1.0, element, 'f64')}, {a}, {result})")
    _finish(e, result, ftz, False)


@operation(r"(ex2|lg2|sin|cos|rsqrt)\.approx(\.ftz)?\.f32", "=f32 f32")
@operation(r"(tanh)\.approx()\.f32", "=f32 f32", 75, (7, 0))
def _approximate(e: Emitter, m: re.Match[str]) -> None:
    ftz = bool(m[2])
    a = _input(e, 1, "f4", ftz)
    wide = e.temp("f8")
    name = {"ex2": "exp2", "lg2": "log2"}.get(m[1], m[1])
    e.line(f"{wide}[...] = {a}")
    if name == "rsqrt":
        e.line(f"sqrt({wide}, {wide}); divide({e.constant(1.0, 'f8', 'f64')}, {wide}, {wide})")
    else:
        e.line(f"{name}({wide}, {wide})")
    result = e.target(e.operands[0], "f4")
    e.line(f"{result}[...] = {wide}")
    _finish(e, result, ftz, False)


@operation(r"(?:ex2|tanh)\.approx\.(f16|f16x2)", "={1} {1}", 75, (7, 0))
@operation(r"ex2\.approx\.ftz\.(bf16|bf16x2)", "={1} {1}", 90, (7, 8))
@operation(r"tanh\.approx\.(bf16|bf16x2)", "={1} {1}", 90, (7, 8))
def _approximate_half(e: Emitter, m: re.Match[str]) -> None:
    name = "exp2" if e.instruction.parts[0] == "ex2" else "tanh"
    kind = m[1].removesuffix("x2")
    a = e.full(e.operands[1], NUMPY[m[1]])
    result = e.target(e.operands[0], NUMPY[m[1]])
    e.line(f"{result}.view(u2)[...] = half_unary({name}, {a}.view(u2), {kind!r})")


@operation(r"testp\.(finite|infinite|number|notanumber|normal|subnormal)\.(f32|f64)", "=pred {2}")
def _testp(e: Emitter, m: re.Match[str]) -> None:
    a = e.source(e.operands[1], NUMPY[m[2]])
    tests = {
        "finite": "isfinite({0})", "infinite": "isinf({0})", "number": "~isnan({0})",
        "notanumber": "isnan({0})", "normal": "is_normal({0})", "subnormal": "is_subnormal({0})",
    }  # fmt: skip
    e.line(f"{e.target(e.operands[0], 'b1')}[...] = {tests[m[1]].format(a)}")


@operation(r"copysign\.(f32|f64)", "={1} {1} {1}")
def _copysign(e: Emitter, m: re.Match[str]) -> None:
    element = NUMPY[m[1]]
    a, b = (e.source(o, element) for o in e.operands[1:])
    e.line(f"copysign({b}, {a}, {e.target(e.operands[0], element)})")


# ---- half precision: one function over the 16-bit lanes of scalar and packed forms ----


def _half(e: Emitter, name: str, kind: str, finish: str = "") -> None:
    element, flush = NUMPY[kind], "half_flush" if "ftz" in e.instruction.parts else ""
    values = [f"{flush}({e.full(o, element)}.view(u2))" for o in e.operands[1:]]
    result = e.target(e.operands[0], element)
    base = kind.removesuffix("x2")
    arguments = ", ".join([*values, repr(base), repr(finish)])
    e.line(f"{result}.view(u2)[...] = {flush}(half_{name}({arguments}))")


@operation(r"(add|sub|mul)(?:\.rn)?(?:\.ftz)?(\.sat)?\.(f16|f16x2)", "={3} {3} {3}")
def _half_arithmetic(e: Emitter, m: re.Match[str]) -> None:
    _half(e, m[1], m[3], "sat" if m[2] else "")


@operation(r"(add|sub|mul)(?:\.rn)?\.(bf16|bf16x2)", "={2} {2} {2}", 90, (7, 8))
def _brain_arithmetic(e: Emitter, m: re.Match[str]) -> None:
    _half(e, m[1], m[2])


@operation(r"fma\.rn(?:\.ftz)?(\.sat)?\.(f16|f16x2)", "={2} {2} {2} {2}")
@operation(r"fma\.rn(?:\.ftz)?(\.relu)\.(f16|f16x2)", "={2} {2} {2} {2}", 80, (7, 0))
@operation(r"fma\.rn(\.relu)?\.(bf16|bf16x2)", "={2} {2} {2} {2}", 80, (7, 0))
def _half_fma(e: Emitter, m: re.Match[str]) -> None:
    _half(e, "fma", m[2], (m[1] or "").strip("."))


@operation(r"(min|max)(?:\.ftz)?(\.NaN)?\.(f16x2)", "={3} {3} {3}", 80, (7, 0))
@operation(r"(min|max)(\.NaN)?\.(bf16|bf16x2)", "={3} {3} {3}", 80, (7, 0))
def _half_minimum(e: Emitter, m: re.Match[str]) -> None:
    _half(e, f"{m[1]}{'_nan' if m[2] else ''}", m[3])
