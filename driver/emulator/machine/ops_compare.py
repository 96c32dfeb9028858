"""Comparison and selection instructions (PTX ISA 9.7.6, 9.7.7)."""

from __future__ import annotations

import re
from collections.abc import Callable

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter, Handler
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
    if "ftz" in e.instruction.parts:
        left, right = f"flush({left})", f"flush({right})"
    if kind not in _FLOATS:
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
    else:
        e.line(f"{_COMPARISONS[comparison]}({left}, {right}, {result})")


_ORDERED = "eq|ne|lt|le|gt|ge"
_ALL_FLOAT = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"
#: Comparisons, what may follow them, and the types that have both (PTX ISA 9.7.6, 9.7.7).
_COMPARED = (
    ("eq|ne", "", "b16|b32|b64"),
    (_ORDERED, "", "s16|s32|s64"),
    (f"{_ORDERED}|lo|ls|hi|hs", "", "u16|u32|u64"),
    (_ALL_FLOAT, r"(?:\.ftz)?", "f32"),
    (_ALL_FLOAT, "", "f64"),
)
_COMPARED_HALF = (_ALL_FLOAT, r"(?:\.ftz)?", "f16")


def _pattern(stem: str, results: str, compared: tuple[str, str, str]) -> str:
    comparisons, flush, types = compared
    return rf"{stem}\.({comparisons})(?:\.(and|or|xor))?{flush}{results}\.({types})"


def _for_each_type(stem: str, results: str, operands: str) -> Callable[[Handler], Handler]:
    """Decorator: the handler of a comparison of every type; a fourth operand combines."""

    def signature(m: re.Match[str]) -> str:
        text = operands.format(m[m.re.groups], *m.groups()[2:])
        return f"{text} pred" if m[2] else text

    def alone(m: re.Match[str]) -> str:
        return signature(m).replace("|pred?", "")

    def register(handler: Handler) -> Handler:
        for compared in _COMPARED:
            operation(_pattern(stem, results, compared), signature)(handler)
        half = _pattern(stem, results.replace("|f32", ""), _COMPARED_HALF)
        return operation(half, alone, 53, (6, 5) if results else (4, 2))(handler)

    return register


@_for_each_type("setp", "", "=pred?|pred? {0} {0}")
def _setp(e: Emitter, m: re.Match[str]) -> None:
    target, a, b, *c = e.operands
    first, second = (
        (target.first, target.second) if isinstance(target, Pair) else (target, Discard())
    )
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


@_for_each_type("set", r"\.(u32|s32|f32)", "={1} {0} {0}")
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


@operation(r"selp\.([bus]16|[bus]32|[bus]64|f32|f64)", "={1} {1} {1} pred")
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


@operation(r"slct(?:\.ftz)?\.([bus]16|[bus]32|[bus]64|f32|f64)\.(f32)", "={1} {1} {1} {2}")
@operation(r"slct\.([bus]16|[bus]32|[bus]64|f32|f64)\.(s32)", "={1} {1} {1} {2}")
def _slct(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, c = e.operands
    element = NUMPY[m[1]]
    left, right, selector = e.source(a, element), e.source(b, element), e.source(c, NUMPY[m[2]])
    if "ftz" in e.instruction.parts:
        selector = f"flush({selector})"
    e.line(f"{e.target(d, element)}[...] = where({selector} >= 0, {left}, {right})")
