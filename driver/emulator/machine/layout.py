"""Layout of an entry: register numbers, parameters, shared variables, constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.driver.emulator.machine.faults import CompileError
from urdir.ptxgen.ptx import TYPE_BYTES, Entry, Module, Variable, Vector
from urdir.ptxgen.ptx.flow import registers


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A shared variable at ``offset`` of its CTA's shared memory."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: its Python name, bytes, and whether it is one value for all lanes."""

    name: str
    width: int
    uniform: bool


def _specials() -> dict[str, Special]:
    table = {}
    for axis in "xyz":
        for name, uniform in (("tid", False), ("ntid", True), ("ctaid", False), ("nctaid", True),
                              ("clusterid", False), ("nclusterid", True),
                              ("cluster_ctaid", False), ("cluster_nctaid", True)):  # fmt: skip
            table[f"%{name}.{axis}"] = Special(f"s_{name}_{axis}", 4, uniform)
    for name in ("laneid", "warpid", "smid", "cluster_ctarank"):
        table[f"%{name}"] = Special(f"s_{name}", 4, False)
    for relation in ("eq", "le", "lt", "ge", "gt"):
        table[f"%lanemask_{relation}"] = Special(f"s_lanemask_{relation}", 4, False)
    for name in ("nwarpid", "nsmid", "clock", "clock_hi", "globaltimer_lo", "globaltimer_hi",
                 "cluster_nctarank", "dynamic_smem_size", "total_smem_size"):  # fmt: skip
        table[f"%{name}"] = Special(f"s_{name}", 4, True)
    for name in ("clock64", "globaltimer", "gridid"):
        table[f"%{name}"] = Special(f"s_{name}", 8, True)
    table["row offset"] = Special("s_row", 8, False)  # start of the lane's CTA in shared memory
    return table


SPECIALS = _specials()

#: The hidden predicate register that add.cc writes.
CARRY = "carry flag"


class EntryLayout:
    """Properties of an entry that are known before its instructions are translated."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self.entry = entry
        registers = {**entry.registers, CARRY: "pred"}
        self.numbers = {name: number for number, name in enumerate(registers)}
        self.widths = [0 if t == "pred" else TYPE_BYTES[t] for t in registers.values()]
        if 16 in self.widths:
            raise CompileError(f"{entry.name}: 128-bit registers are not supported")
        self.parameters: dict[str, tuple[int, int]] = {}
        at = 0
        for p in entry.parameters:
            at = _align(at, p.align)
            self.parameters[p.name] = (at, p.size)
            at += p.size
        self.param_bytes = at
        variables = (*module.variables, *entry.variables)
        self.shared, self.static_shared_bytes = _place_shared(variables)
        for v in variables:
            if v.space == "local":
                raise CompileError(f"PTX line {v.line}: .local variables are not supported")
        self.globals = {v.name for v in variables if v.space in ("global", "const")}
        #: Registers that wgmma uses for A or D.
        self.fragments = _fragments(entry)
        #: Other objects named by the generated text.
        self.kept: dict[str, object] = {}
        self.constants: dict[tuple[str, bytes], str] = {}
        #: The same by (value as written, element, kind).
        self.constant_names: dict[tuple[str, str, str], str] = {}
        self.constant_arrays: dict[str, np.ndarray[Any, Any]] = {}

    def number(self, name: str) -> int:
        """The number of a declared register."""
        return self.numbers[name]

    def width(self, number: int) -> int:
        """Bytes of a register; 0 for a predicate."""
        return self.widths[number]

    def special(self, name: str) -> Special:
        """The description of a special register."""
        return SPECIALS[name]

    def keep(self, thing: object) -> str:
        """The name of an object that the generated text needs."""
        name = f"h{len(self.kept)}"
        self.kept[name] = thing
        return name

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """The name of a constant array; equal arrays share one."""
        key = (array.dtype.str, array.tobytes())
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"k{len(self.constants)}"
            self.constant_arrays[name] = array
        return name


def _fragments(entry: Entry) -> frozenset[str]:
    products = [i for i in entry.instructions if i.parts[:2] == ("wgmma", "mma_async")]
    operands = [o for i in products for o in i.operands[:2] if isinstance(o, Vector)]
    return frozenset(name for operand in operands for name in registers(operand))


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _place_shared(variables: tuple[Variable, ...]) -> tuple[dict[str, SharedVariable], int]:
    """Static variables in order; every extern one begins after them, 16-byte aligned or more."""
    placed: dict[str, SharedVariable] = {}
    at = 0
    shared = [v for v in variables if v.space == "shared"]
    for v in shared:
        if not v.extern:
            at = _align(at, v.align)
            placed[v.name] = SharedVariable(v.name, at, v.nbytes)
            at += v.nbytes
    dynamic = [v for v in shared if v.extern]
    if dynamic:
        start = _align(at, max(16, *(v.align for v in dynamic)))
        for v in dynamic:
            placed[v.name] = SharedVariable(v.name, start, 0)
        at = start
    return placed, at
