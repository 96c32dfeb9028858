"""Instructions that the emulator implements, with right and wrong operands, as lines of PTX.

They are made from its table of operations: opcodes from the patterns, operands from the signatures,
and each operand replaced by others of every kind.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import urdir.driver.emulator.machine.compile  # noqa: F401 - fills the table
from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.operand_check import OperandCheck
from urdir.driver.emulator.machine.operand_rules import Rule, rules_of
from urdir.driver.emulator.machine.operations import TABLE, Operation, find
from urdir.ptxgen import ptx

TYPES = (*(f"{letter}{bits}" for bits in (8, 16, 32, 64) for letter in "bus"),
         "f16", "f32", "f16x2", "f64", "pred")  # fmt: skip
#: Declarations that the lines need, in a module and in its entry.
VARIABLES = ".global .align 16 .b8 gl[64];\n.shared .align 16 .b8 sh[64];\n"
REGISTERS = " ".join(f".reg .{kind} %{kind}_<9>;" for kind in TYPES)
FIRST_LINE = 8
#: What takes an operand's place.
OTHERS = (
    *(f"%{kind}_8" for kind in TYPES), "!%pred_8", "%tid.x", "%clock64", "1", "-1", "70000",
    "0f3F800000", "1.5", "gl", "sh", "par", "{%b32_7, %b32_8}", "{%b16_7, %b16_8}", "[%b64_8]",
    "[sh]", "[gl]", "[par]", "[64]", "[%f64_8]", "[%f32_8]",
)  # fmt: skip
#: The same for an element of a vector.
ELEMENTS = ("%b16_8", "%u32_8", "%f32_8", "%b32_8", "%b64_8", "%pred_8", "0f3F800000")


def operations() -> list[Operation]:
    """Every operation once."""
    return list({id(form): form for forms in TABLE.values() for form in forms}.values())


def opcodes(pattern: str) -> list[str]:
    """The opcodes that a pattern of the table matches; of numbers a few."""
    texts, rest = _alternatives(pattern, pattern)
    assert not rest, pattern
    return [text for text in texts if re.fullmatch(pattern, text)]


def _alternatives(text: str, whole: str) -> tuple[list[str], str]:
    """The texts that match up to a ``)``, and what follows."""
    found: list[str] = []
    sequences = [""]
    while text and text[0] != ")":
        if text[0] == "|":
            found, sequences, text = found + sequences, [""], text[1:]
            continue
        choices, text = _one(text, whole)
        if text[:1] == "?":
            choices, text = ["", *choices], text[1:]
        sequences = [a + b for a, b in itertools.product(sequences, choices)]
        if len(sequences) > 5000:
            sequences = random.Random(2026).sample(sequences, 5000)
    return found + sequences, text


def _one(text: str, whole: str) -> tuple[list[str], str]:
    """The texts of the next part of a pattern, and what follows it."""
    if text.startswith(r"\d+"):
        return ["8", "24", "256"], text[3:]
    if m := re.match(r"\\(\d)", text):  # as an earlier group
        group = list(re.finditer(r"\((?!\?)([^()]*)\)", whole))[int(m[1]) - 1]
        return group[1].split("|"), text[m.end() :]
    if text[0] == "\\":
        return [text[1]], text[2:]
    if text[0] == "[":
        inner, _, rest = text[1:].partition("]")
        return list(inner), rest
    if text[0] == "(":
        found, rest = _alternatives(re.sub(r"\((\?:)?", "", text, count=1), whole)
        return found, rest[1:]
    return [text[0]], text[1:]


@dataclass(frozen=True)
class Line:
    """An instruction, its operation, and what was changed of it."""

    operation: Operation
    text: str
    change: str = ""


def right_operands(rules: Sequence[Rule]) -> list[str]:
    """Operands that the rules allow: registers where possible."""
    numbers = itertools.cycle(range(7))

    def one(rule: Rule) -> str:
        if rule.space:
            variables = {"const": "[%b64_0]", "param": "[par]"}
            return variables.get(rule.space, "[sh]" if rule.space == "shared" else "[%b64_0]")
        if rule.pair is not None:
            return "|".join(map(one, rule.pair))
        if rule.vector is not None and not rule.accepts:
            registers = (register(rule.item) for _ in range(rule.vector.elements))
            return "{" + ", ".join(registers) + "}"
        if rule.item == "=_":
            return "_"
        if rule.accepts == {"#int"}:
            return str(next(iter(rule.values), 1))
        return "LABEL" if rule.item == "label" else register(rule.item)

    def register(item: str) -> str:
        kind = re.sub(r"\W.*", "", item.strip("=("))
        kind = {"i32": "u32", "bf16": "b16", "bf16x2": "b32"}.get(kind, kind)
        return f"%{kind}_{next(numbers)}"

    return [one(rule) for rule in rules]


def right_lines(seed: int, most: int) -> Iterator[Line]:
    """Up to ``most`` opcodes of each operation with operands that it allows."""
    rng = random.Random(seed)
    for form in operations():
        texts = opcodes(form.pattern)
        for opcode in rng.sample(texts, min(most, len(texts))):
            match = form.match(opcode)
            assert match is not None
            try:
                rules = rules_of(form.signature(match), match.groups())
            except CompileError:
                continue
            for operands in map(right_operands, rules.values()):
                yield Line(form, f"{opcode} {', '.join(operands)};")


def wrong_lines(line: Line) -> Iterator[Line]:
    """A line with each operand replaced or left out, or with one more: some are right too."""
    opcode, _, rest = line.text.rstrip(";").partition(" ")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|[^,{}]+", rest) if o.strip()]

    def changed(change: str, others: list[str]) -> Line:
        return Line(line.operation, f"{opcode} {', '.join(others)};", change)

    for at, operand in enumerate(operands):
        before, after = operands[:at], operands[at + 1 :]
        yield changed(f"without operand {at}", before + after)
        for other in OTHERS:
            yield changed(f"{other} as operand {at}", [*before, other, *after])
        if operand[0] != "{":
            continue
        elements = operand[1:-1].split(", ")
        vectors = [(*elements[:-1], other) for other in ELEMENTS]
        for vector in (*vectors, elements[:-1], (*elements, elements[0])):
            if vector:
                text = "{" + ", ".join(vector) + "}"
                yield changed(f"{text} as operand {at}", [*before, text, *after])
    for other in ("%b32_8", "1"):
        yield changed(f"{other} added", [*operands, other])


def module(lines: list[str], version: str, target: str) -> str:
    """PTX of an entry ``k`` with an instruction on each line from `FIRST_LINE` on."""
    text = "\n".join(lines)
    return (
        f".version {version}\n.target {target}\n.address_size 64\n{VARIABLES}"
        f".visible .entry k(.param .align 16 .b8 par[64])\n{{ {REGISTERS}\n{text}\n"
        "LABEL: ret;\n}\n"
    )


def refused_by_emulator(lines: list[str], version: str, target: str) -> dict[str, str]:
    """The lines that do not pass the checks before translation, and why."""
    parsed = ptx.parse(module(lines, version, target))
    entry = parsed.entries["k"]
    checks, found = OperandCheck(parsed, entry), {}
    for line, instruction in zip(lines, entry.instructions, strict=False):
        try:
            _, _, rules = find(instruction, target, parsed.version)
            checks.check(instruction, rules)
        except CompileError as exc:
            found[line] = exc.message
    return found
