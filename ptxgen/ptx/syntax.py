"""Syntax tree of a PTX module (PTX ISA, chapters 4 and 5): operands, instructions, entries.

Registers and labels of nested ``{ }`` scopes get names that are unique in their entry: the first
declaration of a name keeps it, a later one becomes ``name$2`` and so on.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from urdir.ptxgen.ptx.types import TYPE_BYTES


class PtxSyntaxError(Exception):
    """PTX text that does not parse: ``line`` (from 1), ``text`` of the statement, ``reason``."""

    def __init__(self, message: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {message}: {text}")
        self.line = line
        self.text = text
        self.reason = message


@dataclass(frozen=True, slots=True)
class Register:
    """A register (``%r1``, ``%tid.x``), unique in its entry; ``negated`` is ``!%p``."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant; ``kind`` is "int", "f32" (0f...) or "f64" (0d..., decimal floats)."""

    value: int | float
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, the name of a parameter, or a label (unique in its entry)."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``; the base is None in ``[64]``."""

    base: Register | Symbol | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a destination and its predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Discard:
    """``_``: a discarded result."""


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Discard


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``parts`` is the opcode split at its dots."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    predicate: Register | None
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space. ``count`` is None for a scalar, 0 for ``name[]`` (extern)."""

    name: str
    space: str
    type: str
    align: int
    count: int | None
    line: int
    extern: bool = False
    values: tuple[Immediate, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 for an extern array, whose size is set by the launch."""
        return TYPE_BYTES[self.type] * (1 if self.count is None else self.count)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter; ``pointer_space`` ("global") if ``.ptr`` declares a pointer."""

    name: str
    type: str
    size: int
    align: int
    count: int | None
    pointer_space: str | None = None
    pointer_align: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel."""

    name: str
    parameters: tuple[Parameter, ...]
    directives: Mapping[str, tuple[int, ...]]
    registers: Mapping[str, str]
    variables: tuple[Variable, ...]
    body: tuple[Instruction | Label, ...]
    line: int

    @property
    def instructions(self) -> Iterator[Instruction]:
        """The body without its labels."""
        return (item for item in self.body if isinstance(item, Instruction))


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX file; ``target`` is "sm_90", ``version`` (7, 8)."""

    version: tuple[int, int]
    target: str
    entries: Mapping[str, Entry]
    variables: tuple[Variable, ...] = ()
    target_options: tuple[str, ...] = ()


_INTEGER = re.compile(r"[+-]?\s*(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"([+-]?)0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))$")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")


def constant(text: str) -> Immediate | None:
    """The constant in ``text`` (PTX ISA 4.5), or None."""
    if _INTEGER.match(text):
        digits = text.replace(" ", "").rstrip("U").lower()
        sign, digits = (-1, digits[1:]) if digits[0] == "-" else (1, digits.lstrip("+"))
        if digits.startswith("0x"):
            return Immediate(sign * int(digits, 16))
        if digits.startswith("0b"):
            return Immediate(sign * int(digits, 2))
        octal = len(digits) > 1 and digits[0] == "0" and not set(digits) & {"8", "9"}
        return Immediate(sign * int(digits, 8 if octal else 10))
    if m := _FLOAT_BITS.match(text):
        scale = -1.0 if m[1] == "-" else 1.0
        if m[2]:
            value: float = struct.unpack(">f", bytes.fromhex(m[2]))[0]
            return Immediate(scale * value, "f32")
        return Immediate(scale * struct.unpack(">d", bytes.fromhex(m[3]))[0], "f64")
    return Immediate(float(text), "f64") if _DECIMAL.match(text) else None
