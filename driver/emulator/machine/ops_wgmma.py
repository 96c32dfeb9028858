"""wgmma and setmaxnreg: operations of whole warpgroups (PTX ISA 9.7.15, 9.7.19.5)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.operations import operation
from urdir.driver.emulator.machine.register_rules import Operands, bits_of
from urdir.driver.emulator.machine.warpgroups import Multiply
from urdir.driver.emulator.machine.wgmma import ACCUMULATORS, WARPGROUP, M
from urdir.ptxgen.ptx import Operand, Register, Vector

_HOPPER = frozenset(("sm_90a",))
#: Targets with setmaxnreg.
_HANDING_OVER = frozenset(("sm_90a", "sm_100a", "sm_103a", "sm_120a"))


def _operands(m: re.Match[str], d: str, a: str, immediates: str = "") -> str:
    """D, A, B, scale-d, and what follows; ``d`` and ``a`` are types of registers."""
    n, is_s8 = int(m[1]), m[3] == "s8"
    if n % (16 if is_s8 and n > 32 else 8) or not 8 <= n <= 256:
        wanted = "8, 16, 24 or a multiple of 16 from 32" if is_s8 else "a multiple of 8 from 8"
        raise CompileError(f"N is {wanted} to 256, not {n}")
    count = M * n // WARPGROUP // ACCUMULATORS[m[2]][1]
    return f"={d}*{count} {a} u64 pred#0,1{immediates}"


def _half_operands(m: re.Match[str]) -> str:
    """Signs of A and B, and transpositions of those in shared memory."""
    d, signs = "f16x2" if m[2] == "f16" else "f32", " #-1,1 #-1,1"
    in_registers = _operands(m, d, f"{m[3]}x2*4", f"{signs} #0,1")
    return f"{_operands(m, d, 'u64', f'{signs} #0,1 #0,1')} || {in_registers}"


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.(f32|f16)\.(f16)\.f16",
    _half_operands, 90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.(f32)\.(bf16)\.bf16",
    _half_operands, 90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply(e: Emitter, m: re.Match[str]) -> None:
    in_memory = not isinstance(e.operands[1], Vector)
    signs = [e.number(i) for i in e.operands[4:6]]
    transposed = [bool(e.number(i)) for i in e.operands[6:]]
    _product(e, m, signs[0] * signs[1], in_memory and transposed[0], transposed[-1])


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.(s32)\.(s8)\.s8",
    lambda m: _operands(m, "i32", "u64+b32*4"), 90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply_bytes(e: Emitter, m: re.Match[str]) -> None:
    _product(e, m)


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.(f32)\.(e4m3)\.e4m3",
    lambda m: _operands(m, "f32", "u64+f16x2*4", " #-1,1 #-1,1"),
    90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply_e4m3(e: Emitter, m: re.Match[str]) -> None:
    signs = [e.number(i) for i in e.operands[4:]]
    _product(e, m, signs[0] * signs[1])


def _product(
    e: Emitter,
    m: re.Match[str],
    sign: int = 1,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> None:
    d, a, b, scale_d = e.operands[:4]
    accumulators = _registers(e, d)
    in_memory = not isinstance(a, Vector)
    left = _registers(e, a)
    adds: int | bool
    if isinstance(scale_d, Register):
        (adds,), negated = _registers(e, scale_d), scale_d.negated
    else:
        adds, negated = bool(e.number(scale_d)), False
    form = Multiply(
        Operands(e.instruction.line, e.instruction.text, accumulators, bits_of(accumulators),
                 0 if in_memory else bits_of(left)),
        int(m[1]), m[2], m[3], accumulators, left, _registers(e, b)[0], adds, negated,
        sign, a_transposed, b_transposed,
    )  # fmt: skip
    e.line(f"warpgroups.multiply({e.layout.keep(form)}, L)")


def _registers(e: Emitter, operand: Operand) -> tuple[int, ...]:
    """The numbers of registers."""
    numbers = []
    for element in operand.elements if isinstance(operand, Vector) else (operand,):
        if not isinstance(element, Register):
            raise e.fail("descriptors and accumulators must be in registers")
        numbers.append(e.layout.number(element.name))
    return tuple(numbers)


@operation(
    r"wgmma\.(fence|commit_group)\.sync\.aligned", "", 90, (8, 0), warpgroup=True, only=_HOPPER
)
def _fence(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"warpgroups.{m[1].partition('_')[0]}(L)")


@operation(
    r"wgmma\.wait_group\.sync\.aligned",
    f"#0..{2**31 - 1}",
    90,
    (8, 0),
    warpgroup=True,
    only=_HOPPER,
)
def _wait(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"warpgroups.wait({e.number(e.operands[0])}, L)")


@operation(
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", "#24..256/8",
    90, (8, 0), warpgroup=True, only=_HANDING_OVER,
)  # fmt: skip
def _setmaxnreg(e: Emitter, m: re.Match[str]) -> None:
    count = e.number(e.operands[0])
    e.line(f"warpgroups.set_registers({count}, {m[1] == 'inc'}, {e.instruction.line}, L)")
