"""Moves and conversions (PTX ISA 9.7.9: mov, cvt, cvta)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Discard, Operand, Vector

_INTEGER = "u8|s8|u16|s16|u32|s32|u64|s64"
_INTEGRAL = r"cvt\.(rni|rzi|rmi|rpi)"


@operation(r"mov\.(b16|b32|b64)", "={1}/ {1}~/&")
@operation(r"mov\.([us]16|[us]32|[us]64)", "={1} {1}~&")
@operation(r"mov\.(pred|f32|f64)", "={1} {1}")
def _mov(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    element = NUMPY[m[1]]
    if isinstance(d, Vector):
        _unpack(e, d, element)
    elif isinstance(a, Vector):
        _pack(e, a, element)
    else:
        source = e.source(a, element)
        e.line(f"{e.target(d, element)}[...] = {source}")


def _unpack(e: Emitter, d: Vector, element: str) -> None:
    parts = len(d.elements)
    part = f"u{int(element[1]) // parts}"
    source = f"{e.full(e.operands[1], element)}.view({part})"
    for at, operand in enumerate(d.elements):
        if not isinstance(operand, Discard):
            e.line(f"{e.target(operand, part)}[...] = {source}[{at}::{parts}]")


def _pack(e: Emitter, a: Vector, element: str) -> None:
    parts = len(a.elements)
    part = f"u{int(element[1]) // parts}"
    sources = [e.source(operand, part) for operand in a.elements]
    result = e.target(e.operands[0], element, a.elements)
    for at, source in enumerate(sources):
        e.line(f"{result}.view({part})[{at}::{parts}] = {source}")


@operation(r"cvta()\.(global|shared|const)\.u64", "=u64 u64&{2}")
@operation(r"cvta(\.to)\.(global|shared|const)\.u64", "=u64 u64")
def _cvta(e: Emitter, m: re.Match[str]) -> None:
    """Global addresses are generic ones; shared memory begins at SHARED_WINDOW."""
    d, a = e.operands
    source, result = e.source(a, "u8"), e.target(d, "u8")
    if m[2] == "shared":
        name = "subtract" if m[1] else "add"
        e.line(f"{name}({source}, {e.constant(SHARED_WINDOW, 'u8')}, {result})")
    else:
        e.line(f"{result}[...] = {source}")


#: Where shared memory begins in the generic address space.
SHARED_WINDOW = 0x0100_0000_0000


def _range(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _saturating_operands(m: re.Match[str]) -> str:
    """ptxas takes .sat only if some values saturate."""
    (low, high), (least, most) = _range(m[2]), _range(m[3])
    if low <= least and most <= high:
        raise CompileError(f"{m.string}: .sat has no effect, every .{m[3]} is a .{m[2]}: remove it")
    return "={2}> {3}>~"


@operation(rf"cvt()\.({_INTEGER})\.({_INTEGER})", "={2}> {3}>~")
@operation(rf"cvt(\.sat)\.({_INTEGER})\.({_INTEGER})", _saturating_operands)
def _int_to_int(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    to, origin = NUMPY[m[2]], NUMPY[m[3]]
    source = e.source(a, origin)
    if m[1]:
        source = f"saturate_integer({source}, {to})"
    e.line(f"{e.target(d, to)}[...] = {source}")


@operation(rf"cvt\.(rn|rz|rm|rp)(\.sat)?\.(f16|f32|f64)\.({_INTEGER})", "={3}> {4}>")
@operation(rf"cvt\.(rn|rz|rm|rp)()\.(bf16)\.({_INTEGER})", "={3} {4}", 90, (7, 8))
def _int_to_float(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    source, is_long = e.source(a, NUMPY[m[4]]), m[4][1:] == "64"
    result = e.target(d, NUMPY[m[3]])
    if (m[1] == "rn" and m[3] != "bf16") or (m[3] == "f64" and not is_long):
        e.line(f"{result}[...] = {source}")
    elif m[3] == "f64":
        e.line(f"{result}[...] = integer_directed({source}, {m[1]!r})")
    else:
        wide = f"integer_to_odd({source})" if is_long else f"{source}.astype(f8)"
        e.line(f"{result}[...] = narrow({wide}, {m[3]!r}, {m[1]!r})")
    if m[2]:
        e.line(f"saturate({result})")


@operation(rf"{_INTEGRAL}(\.ftz)?(\.sat)?\.({_INTEGER})\.(f32)", "={4}> {5}>")
@operation(rf"{_INTEGRAL}()(\.sat)?\.({_INTEGER})\.(f16|f64)", "={4}> {5}>")
@operation(rf"{_INTEGRAL}()()\.({_INTEGER})\.(bf16)", "={4} {5}", 90, (7, 8))
def _float_to_int(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    source = _as_f64(e, a, m[5], bool(m[2]))
    to = NUMPY[m[4]]
    rounding = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[m[1]]
    e.line(f"{rounding}({source}, {source})")
    has_64 = m[5] == "f64" or m[4][1:] == "64"
    e.line(f"{e.target(d, to)}[...] = float_to_integer({source}, {to}, {has_64})")


def _as_f64(e: Emitter, operand: Operand, kind: str, ftz: bool) -> str:
    name = e.source(operand, NUMPY[kind])
    wide = e.temp("f8")
    if kind == "bf16":
        name = f"bf16_to_f32({name})"
    if ftz and kind != "f64":
        name = f"flush({name})"
    e.line(f"{wide}[...] = {name}")
    return wide


@operation(r"cvt()(\.ftz)?(\.sat)?\.(f32)\.(f16|f32)", "={4}> {5}>")
@operation(r"cvt()(\.ftz)?(\.sat)?\.(f64)\.(f32)", "={4}> {5}>")
@operation(r"cvt()()(\.sat)?\.(f64)\.(f16|f64)", "={4}> {5}>")
@operation(r"cvt()()(\.sat)?\.(f16)\.(f16)", "={4}> {5}>")
@operation(r"cvt()()()\.(f32)\.(bf16)", "={4} {5}", 80, (7, 1))
@operation(r"cvt()(\.ftz)()\.(f32)\.(bf16)", "={4} {5}", 90, (7, 8))
@operation(r"cvt()()()\.(f64)\.(bf16)", "={4} {5}", 90, (7, 8))
@operation(r"cvt()()()\.(bf16)\.(bf16)", "={4} {5}", 90, (7, 8))
@operation(rf"{_INTEGRAL}(\.ftz)?(\.sat)?\.(f32)\.(f32)", "={4}> {5}>")
@operation(rf"{_INTEGRAL}()(\.sat)?\.(f16|f64)\.(\4)", "={4}> {5}>")
def _round_or_widen(e: Emitter, m: re.Match[str]) -> None:
    """To the same or a wider format (exact), or to an integral value of the same format."""
    d, a = e.operands
    to, origin = m[4], m[5]
    result = e.target(d, NUMPY[to])
    name = e.source(a, NUMPY[origin])
    if origin == "bf16" != to:
        name = f"bf16_to_f32({name})"
    if m[2] and origin != "f16":
        name = f"flush({name})"
    if m[1]:
        rounding = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[m[1]]
        e.line(f"{rounding}({name}, {result})")
    else:
        e.line(f"{result}[...] = {name}")
    if m[3]:
        e.line(f"saturate({result})")


_ROUNDED = r"cvt\.(rn|rz|rm|rp)"


@operation(rf"{_ROUNDED}(\.ftz)?()(\.sat)?\.(f16)\.(f32)", "={5}> {6}>")
@operation(r"cvt\.(rn|rz)()(\.relu)()\.(f16)\.(f32)", "={5}> {6}>", 80, (7, 0))
@operation(rf"{_ROUNDED}()()(\.sat)?\.(f16)\.(f64)", "={5}> {6}>")
@operation(rf"{_ROUNDED}(\.ftz)?()(\.sat)?\.(f32)\.(f64)", "={5}> {6}>")
@operation(rf"{_ROUNDED}(\.ftz)?()()\.(bf16)\.(f32)", "={5} {6}", 80, (7, 0))
@operation(r"cvt\.(rn|rz)()(\.relu)()\.(bf16)\.(f32)", "={5} {6}", 80, (7, 0))
@operation(rf"{_ROUNDED}()()()\.(f16|f64)\.(bf16)", "={5} {6}", 90, (7, 8))
@operation(rf"{_ROUNDED}()()()\.(f32)\.(bf16)", "={5} {6}", 80, (7, 1))
@operation(rf"{_ROUNDED}(\.ftz)()()\.(f32)\.(bf16)", "={5} {6}", 90, (7, 8))
@operation(rf"{_ROUNDED}()()()\.(bf16)\.(f16|f64)", "={5} {6}", 90, (7, 8))
def _narrow(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    to, origin = m[5], m[6]
    if (m[1], to, origin) in (("rn", "f16", "f32"), ("rn", "f32", "f64")) and not m[3]:
        result = e.target(d, NUMPY[to])
        e.line(f"{result}[...] = {e.source(a, NUMPY[origin])}")
        if m[2] and to == "f32":
            e.line(f"{result}[...] = flush({result})")
        if m[4]:
            e.line(f"saturate({result})")
        if to == "f16":
            e.line(f"canonical_nan({result})")
        return
    wide = _as_f64(e, a, origin, bool(m[2]))
    if m[3]:
        e.line(f"relu({wide})")
    if m[4]:
        e.line(f"saturate({wide})")
    result = e.target(d, NUMPY[to])
    e.line(f"{result}[...] = narrow({wide}, {to!r}, {m[1]!r})")
    if m[2] and to == "f32":
        e.line(f"{result}[...] = flush({result})")


@operation(r"cvt\.(rn|rz)(\.relu)?\.(f16)x2\.f32", "=f16x2> f32> f32>", 80, (7, 0))
@operation(r"cvt\.(rn|rz)(\.relu)?\.(bf16)x2\.f32", "=bf16x2 f32 f32", 80, (7, 0))
def _narrow_two(e: Emitter, m: re.Match[str]) -> None:
    """The first source goes to the high half."""
    d, a, b = e.operands
    wides = []
    for operand in (b, a):
        wide = _as_f64(e, operand, "f32", False)
        if m[2]:
            e.line(f"relu({wide})")
        wides.append(wide)
    result = e.target(d, "u4")
    view = "f2" if m[3] == "f16" else "u2"
    for at, wide in enumerate(wides):
        e.line(f"{result}.view({view})[{at}::2] = narrow({wide}, {m[3]!r}, {m[1]!r})")


@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32", "=bf16 f32 f32", 90, (7, 8))
@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32", "=bf16 f32 f32", 89, (8, 1))
def _narrow_to_e4m3(e: Emitter, m: re.Match[str]) -> None:
    """The first source goes to the high byte."""
    d, a, b = e.operands
    result = e.target(d, "u2")
    for at, operand in enumerate((b, a)):
        e.line(f"{result}.view('u1')[{at}::2] = f64_to_e4m3({_as_f64(e, operand, 'f32', False)})")


@operation(r"cvt\.rn\.f16x2\.e4m3x2", "=f16x2 bf16", 90, (7, 8))
@operation(r"cvt\.rn\.f16x2\.e4m3x2", "=f16x2 bf16", 89, (8, 1))
def _widen_e4m3(e: Emitter, m: re.Match[str]) -> None:
    """The high byte becomes the high half."""
    d, a = e.operands
    result, source = e.target(d, "u4"), e.source(a, "u2")
    for at in range(2):
        byte = f"({source} >> u2({8 * at})).astype('u1')"
        e.line(f"{result}.view('f2')[{at}::2] = e4m3_to_f32({byte})")
