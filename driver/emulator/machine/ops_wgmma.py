"""wgmma and setmaxnreg: operations of whole warpgroups (PTX ISA 9.7.15, 9.7.19.5)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.driver.emulator.machine.register_rules import Operands, bits_of
from urdir.driver.emulator.machine.warpgroups import Multiply
from urdir.driver.emulator.machine.wgmma import ACCUMULATORS, WARPGROUP, M
from urdir.ptxgen.ptx import Immediate, Operand, Register, Vector

_HOPPER = frozenset(("sm_90a",))
#: Targets with setmaxnreg.
_HANDING_OVER = frozenset(("sm_90a", "sm_100a", "sm_103a", "sm_120a"))


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.(f32|f16)\.(f16)\.f16",
    90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.(f32)\.(bf16)\.bf16",
    90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply(e: Emitter, m: re.Match[str]) -> None:
    n, d_kind = int(m[1]), m[2]
    if n % 8 or not 8 <= n <= 256:
        raise e.fail(f"N is a multiple of 8 from 8 to 256, not {n}")
    in_memory = len(e.operands) > 1 and not isinstance(e.operands[1], Vector)
    if len(e.operands) != (8 if in_memory else 7):
        raise e.fail("wrong number of operands")
    immediates = e.operands[4:]
    scales = [_one_of(e, i, (1, -1)) for i in immediates[:2]]
    transposed = [bool(_one_of(e, i, (0, 1))) for i in immediates[2:]]
    _product(e, n, d_kind, m[3], scales[0] * scales[1], in_memory and transposed[0], transposed[-1])


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.s32\.s8\.s8",
    90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply_bytes(e: Emitter, m: re.Match[str]) -> None:
    n = int(m[1])
    if n % (8 if n <= 32 else 16) or not 8 <= n <= 256:
        raise e.fail(f"N is 8, 16, 24 or a multiple of 16 from 32 to 256, not {n}")
    if len(e.operands) != 4:
        raise e.fail("wrong number of operands")
    _product(e, n, "s32", "s8")


@operation(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3",
    90, (8, 0), warpgroup=True, only=_HOPPER,
)  # fmt: skip
def _multiply_e4m3(e: Emitter, m: re.Match[str]) -> None:
    n = int(m[1])
    if n % 8 or not 8 <= n <= 256:
        raise e.fail(f"N is a multiple of 8 from 8 to 256, not {n}")
    if len(e.operands) != 6:
        raise e.fail("wrong number of operands")
    scales = [_one_of(e, i, (1, -1)) for i in e.operands[4:]]
    _product(e, n, "f32", "e4m3", scales[0] * scales[1])


def _product(
    e: Emitter,
    n: int,
    d_kind: str,
    kind: str,
    sign: int = 1,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> None:
    d, a, b, scale_d = e.operands[:4]
    accumulators = _registers(e, d, M * n // WARPGROUP // ACCUMULATORS[d_kind][1], 4)
    in_memory = not isinstance(a, Vector)
    left = _registers(e, a, 1, 8) if in_memory else _registers(e, a, 4, 4)
    adds: int | bool
    if isinstance(scale_d, Register):
        (adds,), negated = _registers(e, scale_d, 1, 0), scale_d.negated
    else:
        adds, negated = bool(_one_of(e, scale_d, (0, 1))), False
    form = Multiply(
        Operands(e.instruction.line, e.instruction.text, accumulators, bits_of(accumulators),
                 0 if in_memory else bits_of(left)),
        n, d_kind, kind, accumulators, left, _registers(e, b, 1, 8)[0], adds, negated,
        sign, a_transposed, b_transposed,
    )  # fmt: skip
    e.line(f"warpgroups.multiply({e.layout.keep(form)}, L)")


def _one_of(e: Emitter, operand: Operand, allowed: tuple[int, ...]) -> int:
    if isinstance(operand, Immediate) and operand.value in allowed:
        return int(operand.value)
    raise e.fail(f"{operand} must be {' or '.join(map(str, allowed))}")


def _registers(e: Emitter, operand: Operand, count: int, width: int) -> tuple[int, ...]:
    """The numbers of ``count`` registers of ``width`` bytes (0: predicates)."""
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        raise e.fail(f"{count} registers are needed, not {len(elements)}")
    numbers = []
    for element in elements:
        if not isinstance(element, Register) or element.name not in e.layout.numbers:
            raise e.fail(f"{element} is not a register")
        numbers.append(e.layout.number(element.name))
        if e.layout.width(numbers[-1]) != width:
            kind = f"a register of {8 * width} bits" if width else "a predicate"
            raise e.fail(f"{element.name} is not {kind}")
    return tuple(numbers)


@operation(r"wgmma\.(fence|commit_group)\.sync\.aligned", 90, (8, 0), warpgroup=True, only=_HOPPER)
def _fence(e: Emitter, m: re.Match[str]) -> None:
    if e.operands:
        raise e.fail("no operands")
    e.line(f"warpgroups.{m[1].partition('_')[0]}(L)")


@operation(r"wgmma\.wait_group\.sync\.aligned", 90, (8, 0), warpgroup=True, only=_HOPPER)
def _wait(e: Emitter, m: re.Match[str]) -> None:
    (count,) = e.operands
    groups = e.need_immediate(count, "the number of groups")
    if groups < 0:
        raise e.fail(f"{groups} groups cannot be pending")
    e.line(f"warpgroups.wait({groups}, L)")


@operation(
    r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", 90, (8, 0), warpgroup=True, only=_HANDING_OVER
)
def _setmaxnreg(e: Emitter, m: re.Match[str]) -> None:
    (operand,) = e.operands
    count = e.need_immediate(operand, "the number of registers")
    if count % 8 or not 24 <= count <= 256:
        raise e.fail(f"the number of registers is a multiple of 8 from 24 to 256, not {count}")
    e.line(f"warpgroups.set_registers({count}, {m[1] == 'inc'}, {e.instruction.line}, L)")
