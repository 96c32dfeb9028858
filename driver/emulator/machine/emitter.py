"""Emitter of the Python text of a basic block: operands become names of typed numpy views.

``r3_u4`` is the block's fourth register, of every lane of the group, as uint32, ``r3_f4`` the same
bytes as float32, ``t0_f8`` a scratch array, ``k7`` the block's eighth constant (0-d array),
``s_tid_x_u4`` a special register, ``pc0`` a pc, ``n`` the number of lanes, ``W`` the group's warps,
``L`` its lane numbers. The same text serves a group that is a range of lanes (the names are views
of the register file) and a scattered one (the names are gathered copies), see compile.py.
Registers, constants and pcs are numbered as a block comes to them, so that many blocks have one
text; ``Emitter.names`` says what they are in the entry.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.driver.emulator.machine.faults import CompileError
from urdir.ptxgen.ptx import Address, Discard, Immediate, Instruction, Operand, Register, Symbol

if TYPE_CHECKING:
    from urdir.driver.emulator.machine.layout import EntryLayout
    from urdir.driver.emulator.machine.register_rules import Stretch

#: PTX type -> numpy element; bf16 and packed types are bits.
NUMPY: Mapping[str, str] = {
    **{f"{kind}{bits}": f"{'i' if kind == 's' else 'u'}{bits // 8}"
       for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4"},
    "pred": "b1",
}  # fmt: skip

#: Special registers that change during a kernel.
CLOCKS = frozenset(
    ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
)

#: Memory order of an access (PTX ISA 8.4); weak by default.
ORDERS = frozenset(("volatile", "relaxed", "mmio", "acquire", "release", "acq_rel"))

Handler = Callable[["Emitter", re.Match[str]], None]


class Unsupported(CompileError):  # noqa: N818 - says what it is
    """An operand or form that the emulator does not support; the compiler adds the line."""


class Emitter:
    """The text of one block, and which registers it reads and writes."""

    def __init__(self, layout: EntryLayout, watched: bool = False) -> None:
        self.layout = layout
        self.watched = watched
        self.lines: list[str] = []
        self.sources: list[int] = []
        #: Views by register number and element; registers in the order of their first use.
        self.used: dict[int, set[str]] = {}
        #: Names of registers, constants and pcs in the text -> those in the entry.
        self.names: dict[str, str] = {}
        #: Registers whose old values the block needs, and those it writes.
        self.needed: set[int] = set()
        self.written: set[int] = set()
        self.temps: set[str] = set()
        self.specials: set[str] = set()
        self.instruction: Instruction
        self.indent = "    "
        self._scratch = 0
        self._views: dict[tuple[str, str], tuple[int, str]] = {}
        self._own: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._after: list[str] = []
        self._written_now: list[int] = []
        self._mask: str | None = None

    # ---- instructions ----

    def emit(self, instruction: Instruction, handler: Handler, match: re.Match[str]) -> None:
        """Translate one instruction."""
        self.instruction = instruction
        self._scratch = 0
        self._after = []
        self._mask = None
        self._written_now = []
        if instruction.predicate is not None:
            self._mask = self.predicate(instruction.predicate)
        handler(self, match)
        for line in self._after:
            self.line(line)
        self.written.update(self._written_now)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands of the current instruction."""
        return self.instruction.operands

    @property
    def mask(self) -> str | None:
        """The name of the bool array that guards the current instruction."""
        return self._mask

    def line(self, text: str) -> None:
        """Append a line of Python."""
        self.lines.append(self.indent + text)
        self.sources.append(self.instruction.line)

    def lines_of(self, *texts: str) -> None:
        """Append several lines."""
        for text in texts:
            self.line(text)

    def watch(self, event: str, *arguments: str) -> None:
        """In a watched translation, report an event of this instruction; see watch.py."""
        if self.watched:
            self.line(f"watch.{event}({', '.join((str(self.instruction.line), *arguments))})")

    def watch_access(self, action: str, space: str, address: str, shift: int, q: str = "") -> None:
        """Report an access of all lanes, or of the lanes that further arguments ``q`` pick."""
        order = next((p for p in self.instruction.parts if p in ORDERS), "weak")
        if action == "atomic" and order == "weak":
            order = "relaxed"
        self.watch("access", repr(action), repr(order), repr(space), address, str(shift), "L" + q)

    def fail(self, message: str) -> Unsupported:
        """An error about the current instruction."""
        return Unsupported(message)

    def check(self, stretch: Stretch) -> None:
        """Before instructions that touch registers which wgmma uses, see register_rules.py."""
        self.lines.append(f"    warpgroups.run({self.layout.keep(stretch)}, L)")
        self.sources.append(stretch.touches[0].line)

    # ---- operands ----

    def temp(self, element: str) -> str:
        """A scratch array of n elements, private to the instruction."""
        name = f"t{self._scratch}_{element}"
        self._scratch += 1
        self.temps.add(name)
        return name

    def row(self, element: str, count: int) -> str:
        """A scratch array (n, count)."""
        name = f"t{self._scratch}_{element}x{count}"
        self._scratch += 1
        self.temps.add(name)
        return name

    def register(self, name: str, element: str, old: bool = True) -> str:
        """The view of a register as ``element``: its low bytes if it is wider."""
        found = self._views.get((name, element))
        if found is None:
            found = self._views[name, element] = self._new_view(name, element)
        number, view = found
        if old and number not in self.written:
            self.needed.add(number)
        return view

    def _new_view(self, name: str, element: str) -> tuple[int, str]:
        """A register's number and its view, at the block's first use of it."""
        number = self.layout.number(name)
        self.used.setdefault(number, set()).add(element)
        return number, self.own_name("r", str(number), f"_{element}")

    def own_name(self, kind: str, of: str, suffix: str = "") -> str:
        """The block's name for what is called ``kind + of + suffix`` in the entry."""
        own = self._own.get(kind + of)
        if own is None:
            own = self._own[kind + of] = f"{kind}{self._counts[kind]}"
            self._counts[kind] += 1
        self.names[own + suffix] = kind + of + suffix
        return own + suffix

    def special(self, name: str, element: str) -> str:
        """A special register; a 64-bit name does not imply its low half."""
        known = self.layout.special(name)
        if known.width != int(element[1]):
            wide = self.temp(element)
            self.line(f"{wide}[...] = {self.special(name, f'u{known.width}')}")
            return wide
        if name in CLOCKS:
            self.line("machine.tick()")
        self.specials.add(f"{known.name}_{element}")
        return f"{known.name}_{element}"

    def source(self, operand: Operand, element: str) -> str:
        """An array (n,), (1,) or () with the operand's value as ``element``."""
        if isinstance(operand, Register):
            if operand.name in self.layout.numbers:
                view = self.register(operand.name, element)
            else:
                view = self.special(operand.name, element)
            if not operand.negated:
                return view
            inverted = self.temp("b1")
            self.line(f"logical_not({view}, {inverted})")
            return inverted
        if isinstance(operand, Immediate):
            return self.constant(operand.value, element, operand.kind)
        assert isinstance(operand, Symbol)
        return self.symbol(operand, element)

    def full(self, operand: Operand, element: str) -> str:
        """Like ``source``, but always of shape (n,) and contiguous."""
        name = self.source(operand, element)
        if (
            isinstance(operand, Register)
            and operand.name in self.layout.numbers
            and self.layout.width(self.layout.number(operand.name)) in (0, int(element[1]))
        ):
            return name
        filled = self.temp(element)
        self.line(f"{filled}[...] = {name}")
        return filled

    def constant(self, value: int | float, element: str, kind: str = "int") -> str:
        """The name of a constant; integers wrap to the element's width."""
        key = (repr(value), element, kind)  # -0.0 is not 0.0
        name = self.layout.constant_names.get(key)
        if name is None:
            array = constant_array(value, element, kind)
            if array is None:
                raise self.fail(f"{value} is not a constant of this type")
            name = self.layout.constant_names[key] = self.layout.constant(array)
        return self.own_name("k", name[1:])

    def symbol(self, operand: Symbol, element: str) -> str:
        """The address of a variable."""
        if operand.name in self.layout.shared:
            return self.constant(self.layout.shared[operand.name].offset, element)
        self.specials.add(f"g_{operand.name}_u8")
        return f"g_{operand.name}_u8"

    def immediate(self, operand: Operand) -> int | None:
        """The value of an integer constant; None for anything else."""
        if isinstance(operand, Immediate) and isinstance(operand.value, int):
            return operand.value
        return None

    def number(self, operand: Operand) -> int:
        """The value of an operand that is an integer constant."""
        assert isinstance(operand, Immediate)
        return int(operand.value)

    def predicate(self, register: Register) -> str:
        """The bool array of a guard."""
        if register.negated:
            name = self.temp("b1")
            self.line(f"logical_not({self.register(register.name, 'b1')}, {name})")
            return name
        return self.register(register.name, "b1")

    def target(self, operand: Operand, element: str, apart_from: Sequence[Operand] = ()) -> str:
        """An array (n,) for the result; guards and wider registers are handled afterwards.

        A result narrower than its register is extended by the element's signedness. The array
        differs from the registers ``apart_from``, so that it may be written before they are read.
        """
        if isinstance(operand, Discard):
            return self.temp(element)
        assert isinstance(operand, Register)
        number = self.layout.number(operand.name)
        width = self.layout.width(number)
        wide = element
        if element != "b1" and width > int(element[1]):
            wide = ("i" if element[0] == "i" else "u") + str(width)
        guarded = self._mask is not None
        view = self.register(operand.name, wide, old=guarded)
        self._written_now.append(number)
        if not guarded and wide == element and not self.same(operand, *apart_from):
            return view
        result = self.temp(element)
        self._after.append(
            f"copyto({view}, {result}, where={self._mask})"
            if guarded
            else f"{view}[...] = {result}"
        )
        return result

    def direct_target(self, operand: Operand, element: str) -> tuple[str, str]:
        """The register's view to assign to, and its element; the caller applies the guard."""
        assert isinstance(operand, Register)
        number = self.layout.number(operand.name)
        width = self.layout.width(number)
        if element != "b1" and width > int(element[1]):
            element = ("i" if element[0] == "i" else "u") + str(width)
        view = self.register(operand.name, element, old=self._mask is not None)
        self._written_now.append(number)
        return view, element

    def same(self, target: Operand, *sources: Operand) -> bool:
        """Whether a source is the register that the result goes to."""
        return isinstance(target, Register) and any(
            isinstance(s, Register) and s.name == target.name for s in sources
        )

    def address(self, operand: Operand) -> str:
        """An array (n,) uint64 with the addresses of ``[base+offset]``."""
        assert isinstance(operand, Address)
        base = operand.base
        offset = operand.offset
        if isinstance(base, Register) and base.name in self.layout.numbers:
            width = self.layout.width(self.layout.number(base.name))
            view = self.register(base.name, f"u{width}")
            if width == 8 and offset == 0:
                return view
            result = self.temp("u8")
            if width == 8:
                self.line(f"add({view}, {self.constant(offset, 'u8')}, {result})")
                return result
            self.line(f"{result}[...] = {view}")
            if offset:
                self.line(f"add({result}, {self.constant(offset, 'u8')}, {result})")
            return result
        result = self.temp("u8")
        if isinstance(base, Symbol) and base.name in self.layout.globals:
            self.line(f"{result}[...] = {self.symbol(base, 'u8')}")
            if offset:
                self.line(f"add({result}, {self.constant(offset, 'u8')}, {result})")
        else:
            assert isinstance(base, Symbol)
            offset += self.layout.shared[base.name].offset
            self.line(f"{result}[...] = {self.constant(offset, 'u8')}")
        return result


def constant_array(value: int | float, element: str, kind: str) -> np.ndarray[Any, Any] | None:
    """A 0-d array of ``element``; None if the constant does not fit the type."""
    if element == "b1":
        return np.array(bool(value), np.bool_)
    bits = 8 * int(element[1])
    with np.errstate(all="ignore"):
        if element[0] == "f":
            return np.array(value, element)
        if isinstance(value, float):
            if (kind, bits) == ("f32", 32) or (kind == "f64" and bits in (32, 64)):
                return np.array(value, f"f{bits // 8}").view(element)
            return None
    wrapped = value & ((1 << bits) - 1)
    return np.array(wrapped, f"u{bits // 8}").view(element)
