"""mma.sync, ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.matrix import SHAPES, per_register
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Operand, Vector


def _registers(e: Emitter, operand: Operand, count: int) -> list[Operand]:
    elements: list[Operand] = [operand]
    if isinstance(operand, Vector):
        elements = list(operand.elements)
    if len(elements) != count:
        raise e.fail(f"a fragment of {count} registers is needed, not {len(elements)}")
    return elements


@operation(
    r"mma\.sync\.aligned\.(m16n8k8)\.row\.col()\.(f32)\.(f16)\.(f16)\.(f32)", 75, (6, 5),
    converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k8)\.row\.col()\.(f32)\.(bf16)\.(bf16)\.(f32)", 80, (7, 0),
    converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16)\.row\.col()\.(f32)\.(f16|bf16)\.(f16|bf16)\.(f32)",
    80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16)\.row\.col()\.(f16)\.(f16)\.(f16)\.(f16)",
    80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m8n8k16)\.row\.col(\.satfinite)?\.(s32)\.([us]8)\.([us]8)\.(s32)",
    75, (6, 5), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k16|m16n8k32)\.row\.col(\.satfinite)?"
    r"\.(s32)\.([us]8)\.([us]8)\.(s32)",
    80, (7, 0), converges=True,
)  # fmt: skip
@operation(
    r"mma\.sync\.aligned\.(m16n8k32)\.row\.col()\.(f32)\.(e4m3)\.(e4m3)\.(f32)", 89, (8, 4),
    converges=True,
)  # fmt: skip
def _mma(e: Emitter, m: re.Match[str]) -> None:
    shape, kinds = m[1], (m[4], m[5], m[6])
    if m[4][0] in "fb" and m[4] != m[5]:
        raise e.fail("A and B have one floating-point type")
    packed = per_register(m[4])
    s = SHAPES[shape, packed]
    narrow = 2 if m[6] == "f16" else 1
    sizes = [len(places) // pack for places, pack in ((s.a, packed), (s.b, packed), (s.c, narrow))]
    d, *inputs = e.operands
    fragments = [
        "(" + "".join(f"{e.full(r, 'u4')}, " for r in _registers(e, operand, size)) + ")"
        for operand, size in zip(inputs, sizes, strict=True)
    ]
    arguments = f"W, {shape!r}, {kinds!r}, {bool(m[2])}, {', '.join(fragments)}"
    e.line(f"v = mma({arguments})")
    for at, register in enumerate(_registers(e, d, sizes[2])):
        e.line(f"{e.target(register, 'u4')}[...] = v[{at}]")


def _addressed(count: int) -> str:
    """The lanes that give the addresses of ``count`` matrices' rows, as one more argument."""
    return f", (L % 32 < {8 * count}).nonzero()[0]"


@operation(
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared(?:::cta)?)?\.b16",
    75, (6, 5), converges=True,
)  # fmt: skip
def _ldmatrix(e: Emitter, m: re.Match[str]) -> None:
    d, source = e.operands
    registers = _registers(e, d, int(m[1]))
    rows = e.special("row offset", "u8")
    address = e.address(source)
    e.line(f"v = ldmatrix(W, shared.memory, {address}, {rows}, {m[1]}, {bool(m[2])})")
    e.watch_access("load", "shared", address, 4, _addressed(int(m[1])))
    for at, register in enumerate(registers):
        e.line(f"{e.target(register, 'u4')}[...] = v[{at}]")


@operation(
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?(?:\.shared(?:::cta)?)?\.b16",
    90, (7, 8), converges=True,
)  # fmt: skip
def _stmatrix(e: Emitter, m: re.Match[str]) -> None:
    destination, value = e.operands
    data = "".join(f"{e.full(r, 'u4')}, " for r in _registers(e, value, int(m[1])))
    rows = e.special("row offset", "u8")
    address = e.address(destination)
    e.watch_access("store", "shared", address, 4, _addressed(int(m[1])))
    e.line(f"stmatrix(W, shared.memory, {address}, {rows}, ({data}), {bool(m[2])})")


@operation(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", 75, (7, 8), converges=True)
def _movmatrix(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    e.line(f"v = movmatrix(W, {e.full(a, 'u4')})")
    e.line(f"{e.target(d, 'u4')}[...] = v")
