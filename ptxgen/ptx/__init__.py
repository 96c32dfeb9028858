"""PTX text to instructions (PTX ISA, chapters 4 and 5), their control flow, GPU architectures.

Lint, statistics and the emulator use the same parser. This is the one part of ptxgen that the
driver imports, so it imports nothing outside itself.
"""

from urdir.ptxgen.ptx.parser import parse
from urdir.ptxgen.ptx.syntax import (
    TYPE_BYTES,
    Address,
    Discard,
    Entry,
    Immediate,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Parameter,
    PtxSyntaxError,
    Register,
    Symbol,
    Variable,
    Vector,
)

__all__ = [
    "TYPE_BYTES",
    "Address",
    "Discard",
    "Entry",
    "Immediate",
    "Instruction",
    "Label",
    "Module",
    "Operand",
    "Pair",
    "Parameter",
    "PtxSyntaxError",
    "Register",
    "Symbol",
    "Variable",
    "Vector",
    "parse",
]
