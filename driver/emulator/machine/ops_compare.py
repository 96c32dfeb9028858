"""Comparison and selection instructions (PTX ISA 9.7.6, 9.7.7)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Discard, Operand, Pair

_COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal", "lo": "less", "ls": "less_equal", "hi": "greater",
    "hs": "greater_equal",
}  # fmt: skip
# Unordered comparisons are the negation of the opposite ordered one; `ne` is false for NaN.
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_FLOATS = ("f16", "f32", "f64")


def compare(e: Emitter, comparison: str, kind: str, a: Operand, b: Operand, result: str) -> None:
    """Write the comparison of two operands to the bool array ``result``."""
    element = NUMPY[kind]
    left, right = e.source(a, element), e.source(b, element)
    if kind not in _FLOATS:
        if comparison not in _COMPARISONS:
            raise e.fail(f".{comparison} does not compare .{kind}")
        if comparison in ("lo", "ls", "hi", "hs") and element[0] != "u":
            raise e.fail(f".{comparison} does not compare .{kind}")
        e.line(f"{_COMPARISONS[comparison]}({left}, {right}, {result})")
    elif comparison in ("num", "nan"):
        both = f"isnan({left}) | isnan({right})"
        e.line(f"{result}[...] = {both if comparison == 'nan' else f'~({both})'}")
    elif comparison == "ne":
        e.line(f"{result}[...] = less({left}, {right}) | greater({left}, {right})")
    elif comparison == "equ":
        e.line(f"{result}[...] = ~(less({left}, {right}) | greater({left}, {right}))")
    elif comparison in _UNORDERED:
        opposite = _COMPARISONS[_UNORDERED[comparison]]
        e.line(f"{opposite}({left}, {right}, {result}); logical_not({result}, {result})")
    elif comparison in ("eq", "lt", "le", "gt", "ge"):
        e.line(f"{_COMPARISONS[comparison]}({left}, {right}, {result})")
    else:
        raise e.fail(f".{comparison} does not compare .{kind}")


@operation(
    r"setp\.([a-z]+)(?:\.(and|or|xor))?(?:\.ftz)?"
    r"\.(b16|b32|b64|[us]16|[us]32|[us]64|f16|f32|f64)"
)
def _setp(e: Emitter, m: re.Match[str]) -> None:
    target, a, b, *c = e.operands
    first, second = (
        (target.first, target.second) if isinstance(target, Pair) else (target, Discard())
    )
    if bool(m[2]) != (len(c) == 1):
        raise e.fail("setp with a combining operation takes four operands, without three")
    if not m[2] and isinstance(second, Discard):
        compare(e, m[1], m[3], a, b, e.target(first, "b1"))
        return
    outcome = e.temp("b1")
    compare(e, m[1], m[3], a, b, outcome)
    combining = e.source(c[0], "b1") if m[2] else ""
    inverse = e.temp("b1")
    e.line(f"logical_not({outcome}, {inverse})")
    for operand, result in ((first, outcome), (second, inverse)):
        if isinstance(operand, Discard):
            continue
        if m[2]:
            e.line(f"bitwise_{m[2]}({result}, {combining}, {result})")
    for operand, result in ((first, outcome), (second, inverse)):
        if not isinstance(operand, Discard):
            e.line(f"{e.target(operand, 'b1')}[...] = {result}")


@operation(
    r"set\.([a-z]+)(?:\.(and|or|xor))?(?:\.ftz)?"
    r"\.(u32|s32|f32)\.(b16|b32|b64|[us]16|[us]32|[us]64|f16|f32|f64)"
)
def _set(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, *c = e.operands
    outcome = e.temp("b1")
    compare(e, m[1], m[4], a, b, outcome)
    if m[2]:
        e.line(f"bitwise_{m[2]}({outcome}, {e.source(c[0], 'b1')}, {outcome})")
    if m[3] == "f32":
        e.line(f"{e.target(d, 'f4')}[...] = {outcome}")
        return
    result = e.target(d, "i4")
    e.line(f"{result}[...] = {outcome}; negative({result}, {result})")


@operation(r"selp\.(b16|b32|b64|[us]16|[us]32|[us]64|f16|f32|f64)")
def _selp(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, p = e.operands
    element = "u" + NUMPY[m[1]][1]
    if m[1][0] == "f":
        left, right = e.source(a, NUMPY[m[1]]), e.source(b, NUMPY[m[1]])
        result = e.target(d, NUMPY[m[1]])
    else:
        left, right = e.source(a, element), e.source(b, element)
        result = e.target(d, element)
    e.line(f"{result}[...] = where({e.source(p, 'b1')}, {left}, {right})")


@operation(r"slct\.(b16|b32|b64|[us]16|[us]32|[us]64|f32|f64)\.(s32|f32)")
def _slct(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, c = e.operands
    element = NUMPY[m[1]]
    left, right, selector = e.source(a, element), e.source(b, element), e.source(c, NUMPY[m[2]])
    e.line(f"{e.target(d, element)}[...] = where({selector} >= 0, {left}, {right})")
