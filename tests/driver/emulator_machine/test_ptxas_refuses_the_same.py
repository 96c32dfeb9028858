"""The emulator refuses the instructions that ptxas refuses, and takes those that it takes."""

from __future__ import annotations

import random
import re

import pytest

from tests.driver.emulator_machine.ptx_forms import (
    FIRST_LINE,
    module,
    refused_by_emulator,
    right_lines,
    wrong_lines,
)
from urdir.ptxgen.tools import assemble

#: What ptxas takes though it means nothing, or the emulator has no use for.
LENIENT = re.compile(
    r"\[sh\]|matrix.*(\[gl\]|%pred_8|0f)"  # a shared variable as generic address
    r"|^(mov|and|or|xor|not|vote)\..*%f16x2_8"  # a predicate in a register of .f16x2
    r"|%\w+_\d, (%pred_8|0f\w+)\}"  # only the first element of a vector counts
    r"|mma.*bf16.*\{(%b32_\d, )+(%u32_8|%f32_8)\}"
    r"|^cp\.async\.bulk\.shared.*, ([^\[]*|\{.*\})(, %\w+)*;$"  # no address of an mbarrier
    r"|^wgmma.*\}, (-?\d+, %\w+|%\w+, -?\d+), "  # a constant as descriptor
    r"|^mov\.(b16|[su]32).* (gl|sh);$|^mov.*par;|^ld\.param|^isspacep|^st\.async\.weak|%b32_8;$"
    r"|^fence\.(acquire|release)\.cluster|^cvt\.bf16\.bf16 \{"  # older assemblers
)
TARGETS = (
    ("6.3", "sm_75"), ("7.0", "sm_80"), ("7.8", "sm_89"), ("8.0", "sm_90"), ("9.0", "sm_90a"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def whole_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the assembler have all lines of its log."""
    monkeypatch.setattr(assemble, "_MOST_LINES", 10**6)


def refused_by_ptxas(lines: list[str], version: str, target: str) -> set[str]:
    """ptxas reports all wrong lines of some kinds at once; further ones when those are gone."""
    try:
        assemble.assemble(module(lines, version, target), target, options=("-O0",))
        return set()
    except assemble.AssembleError as exc:
        found = {int(n) - FIRST_LINE for n in re.findall(r"line (\d+); (?:error|fatal)", str(exc))}
    wrong = {lines[at] for at in found if 0 <= at < len(lines)}
    if not wrong and len(lines) == 1:
        return set(lines)
    if wrong:
        rest = [line for line in lines if line not in wrong]
        return wrong | (refused_by_ptxas(rest, version, target) if rest else set())
    half = len(lines) // 2
    return refused_by_ptxas(lines[:half], version, target) | refused_by_ptxas(
        lines[half:], version, target
    )


def compare(lines: list[str], version: str, target: str) -> None:
    taken, refused = [], []
    for start in range(0, len(lines), 1000):
        some = lines[start : start + 1000]
        emulator = refused_by_emulator(some, version, target)
        ptxas = refused_by_ptxas(some, version, target)
        taken += sorted(ptxas - emulator.keys())
        refused += [emulator[line] for line in sorted(emulator.keys() - ptxas)
                    if not LENIENT.search(line)]  # fmt: skip
    assert not taken, "the emulator takes:\n" + "\n".join(taken)
    assert not refused, "ptxas takes:\n" + "\n".join(refused)


needs_assembler = pytest.mark.skipif(
    not assemble.is_available(), reason="nvJitLink is not installed"
)


@needs_assembler
@pytest.mark.parametrize(("version", "target"), TARGETS)
def test_forms(version: str, target: str) -> None:
    """Opcodes of every operation, many of which a target or version lacks."""
    compare([line.text for line in right_lines(seed=5, most=1)], version, target)


@needs_assembler
def test_operands(request: pytest.FixtureRequest) -> None:
    """Operands of every operation that are wrong for most."""
    lines = [other.text for line in right_lines(seed=7, most=1) for other in wrong_lines(line)]
    if not request.config.getoption("--full"):
        lines = random.Random(9).sample(lines, 1000)
    compare(lines, "9.0", "sm_90a")
