"""mma.sync, ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.matrix import SHAPES, per_register
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Operand, Vector


def elements_of(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a fragment."""
    assert isinstance(operand, Vector)
    return operand.elements


def _fragments(m: re.Match[str]) -> str:
    """The operands of mma: D, A, B and C."""
    packed = per_register(m[4])
    s = SHAPES[m[1], packed]
    pairs = m[6] == "f16"
    a, b, c = len(s.a) // packed, len(s.b) // packed, len(s.c) // (2 if pairs else 1)
    factor = {"f16": "f16x2", "bf16": "bf16x2"}.get(m[4], "u32" if m[1] == "m8n8k16" else "b32")
    total = "f16x2" if pairs else m[6].replace("s32", "i32")
    return f"={total}?*{c} {factor}*{a} {factor}*{b} {total}*{c}"


@operation(
    r"mma\.sync\.aligned\.(m16n8k8)\.row\.col()\.(f32)\.(f16)\.(f16)\.(f32)",
    _fragments, 75, (6, 5), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k8)\.row\.col()\.(f32)\.(bf16)\.(bf16)\.(f32)",
    _fragments, 80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16)\.row\.col()\.(f32)\.(f16|bf16)\.(\4)\.(f32)",
    _fragments, 80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16)\.row\.col()\.(f16)\.(f16)\.(f16)\.(f16)",
    _fragments, 80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m8n8k16)\.row\.col(\.satfinite)?\.(s32)\.([us]8)\.([us]8)\.(s32)",
    _fragments, 75, (6, 5), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16|m16n8k32)\.row\.col(\.satfinite)?"
    r"\.(s32)\.([us]8)\.([us]8)\.(s32)",
    _fragments, 80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k32)\.row\.col()\.(f32)\.(e4m3)\.(e4m3)\.(f32)",
    _fragments, 89, (8, 4), converges=True,
)  # fmt: skip
def _mma(e: Emitter, m: re.Match[str]) -> None:
    shape, kinds = m[1], (m[4], m[5], m[6])
    d, *inputs = e.operands
    fragments = [
        "(" + "".join(f"{e.full(r, 'u4')}, " for r in elements_of(operand)) + ")"
        for operand in inputs
    ]
    arguments = f"W, {shape!r}, {kinds!r}, {bool(m[2])}, {', '.join(fragments)}"
    e.line(f"v = mma({arguments})")
    for at, register in enumerate(elements_of(d)):
        e.line(f"{e.target(register, 'u4')}[...] = v[{at}]")


def _addressed(count: int) -> str:
    """The lanes that give the addresses of ``count`` matrices' rows, as one more argument."""
    return f", (L % 32 < {8 * count}).nonzero()[0]"


@operation(
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared(?:::cta)?)?\.b16",
    "=b32?*{1} [shared]",
    75, (6, 5), converges=True,
)  # fmt: skip
def _ldmatrix(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands
    registers = elements_of(d)
    rows = e.special("row offset", "u8")
    address = e.address(source)
    e.line(f"v = ldmatrix(W, shared.memory, {address}, {rows}, {m[1]}, {bool(m[2])})")
    e.watch_access("load", "shared", address, 4, _addressed(int(m[1])))
    for at, register in enumerate(registers):
        e.line(f"{e.target(register, 'u4')}[...] = v[{at}]")


@operation(
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared(?:::cta)?)?\.b16",
    "[shared] b32*{1}",
    90, (7, 8), converges=True,
)  # fmt: skip
def _stmatrix(e: Emitter, m: re.Match[str]) -> None:
    destination, value = e.operands
    data = "".join(f"{e.full(r, 'u4')}, " for r in elements_of(value))
    rows = e.special("row offset", "u8")
    address = e.address(destination)
    e.watch_access("store", "shared", address, 4, _addressed(int(m[1])))
    e.line(f"stmatrix(W, shared.memory, {address}, {rows}, ({data}), {bool(m[2])})")


@operation(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", "=b32 b32!", 75, (7, 8), converges=True)
def _movmatrix(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    e.line(f"v = movmatrix(W, {e.full(a, 'u4')})")
    e.line(f"{e.target(d, 'u4')}[...] = v")
