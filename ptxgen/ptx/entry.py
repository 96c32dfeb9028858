"""Parser of one ``.entry``: parameter list, directives, scopes, instructions, operands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from urdir.ptxgen.ptx.source import STATEMENT, Source
from urdir.ptxgen.ptx.syntax import (
    Address,
    Discard,
    Entry,
    Instruction,
    Label,
    Operand,
    Pair,
    Parameter,
    Register,
    Symbol,
    Variable,
    Vector,
    constant,
)
from urdir.ptxgen.ptx.types import TYPE_BYTES

_DIRECTIVE = re.compile(r"\s*\.(\w+)(\s+[\d\s,]+)?")
_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([\w$%.]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_REGISTERS = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", re.S)
#: Limit per declaration: thousands of times what kernels need.
_MOST_REGISTERS = 1 << 18
_RANGE = re.compile(r"([\w$%]+)(?:<(\d+)>)?$")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.(\w+)\s+)??(?:\.align\s+(\d+)\s+)?)?([\w$%]+)\s*(?:\[([^\]]*)\])?"
)
_OPERAND = re.compile(r"\s*(\[[^\]]*\]|\{[^}]*\}|[^,\[\]{}]+)\s*(?:,|$)")
_ADDRESS = re.compile(r"\[\s*([A-Za-z_$%][\w$%.]*)?\s*(?:\+\s*(?=-))?([+-]?\s*\w+)?\s*\]$")
_NAME = re.compile(r"[A-Za-z_$%][\w$]*(?:\.[xyzw])?$")
_SPECIAL = re.compile(
    r"%(?:n?tid(?:\.[xyzw])?|n?ctaid(?:\.[xyzw])?|laneid|n?warpid|n?smid|gridid|lanemask_\w+"
    r"|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|pm\d+|envreg\d+|is_explicit_cluster"
    r"|n?clusterid(?:\.[xyzw])?|cluster_n?cta(?:id|rank)(?:\.[xyzw])?"
    r"|total_smem_size|dynamic_smem_size|aggr_smem_size|current_graph_exec)$"
)


@dataclass(slots=True)
class _Scope:
    parent: _Scope | None
    names: dict[str, str] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@dataclass(slots=True)
class _Statement:
    kind: str  # "{", "}", "label" or "code"
    text: str
    at: int


def parse_entry(
    source: Source, header: re.Match[str], module_variables: list[Variable]
) -> tuple[Entry, int]:
    """A kernel, and the position after its body.

    ``header`` is its name, its parameter list, and the directives before its brace. Raises
    PtxSyntaxError.
    """
    return _EntryParser(source, header, module_variables).parse()


class _EntryParser:
    """One ``.entry``: its parameter list, directives, and body."""

    def __init__(
        self, source: Source, header: re.Match[str], module_variables: list[Variable]
    ) -> None:
        self.source = source
        self.header = header
        self.registers: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.body: list[Instruction | Label] = []
        self.taken: dict[str, int] = {}
        self.globals = {v.name: v.name for v in module_variables}

    def parse(self) -> tuple[Entry, int]:
        parameters = self.parameters()
        directives = self.directives()
        statements, end = self.statements()
        self.globals |= {p.name: p.name for p in parameters}
        self.process(statements)
        entry = Entry(
            name=self.header[1],
            parameters=parameters,
            directives=directives,
            registers=self.registers,
            variables=tuple(self.variables),
            body=tuple(self.body),
            line=self.source.line(self.header.start(1)),
        )
        return entry, end

    def parameters(self) -> tuple[Parameter, ...]:
        text = (self.header[2] or "").strip()
        result = []
        for item in text.split(",") if text else ():
            m = _PARAMETER.match(item.strip())
            at = self.header.start(2)
            if not m or m.end() != len(item.strip()) or m[2] not in TYPE_BYTES:
                raise self.source.error("not a parameter", at, item)
            align, type_, space, pointer_align, name, array = m.groups()
            count = None if array is None else self.source.integer(array, at, item)
            element = TYPE_BYTES[type_]
            is_pointer = ".ptr" in item
            result.append(
                Parameter(
                    name,
                    type_,
                    size=element * (1 if count is None else count),
                    align=int(align) if align else element,
                    count=count,
                    pointer_space=(space or "generic") if is_pointer else None,
                    pointer_align=int(pointer_align) if pointer_align else (4 if is_pointer else 0),
                )
            )
        return tuple(result)

    def directives(self) -> dict[str, tuple[int, ...]]:
        text, at, found = self.header[3], 0, {}
        while text[at:].strip():
            m = _DIRECTIVE.match(text, at)
            if not m:
                raise self.source.error("not a directive", self.header.start(3), text[at:])
            found[m[1]] = tuple(int(s) for s in (m[2] or "").replace(",", " ").split())
            at = m.end()
        return found

    def statements(self) -> tuple[list[_Statement], int]:
        text, at, depth = self.source.text, self.header.end(), 1
        result: list[_Statement] = []
        while depth:
            at = self.source.skip_space(at)
            m = STATEMENT.match(text, at)
            if not m:
                shown = self.source.line_text(at) or "end of file"
                raise self.source.error("a statement without its ';' or '}'", at, shown)
            if m[1]:
                depth += 1 if m[1] == "{" else -1
                result.append(_Statement(m[1], m[1], at))
            elif m[2]:
                result.append(_Statement("label", m[2], at))
            else:
                result.append(_Statement("code", m[3].rstrip(), at))
            at = m.end()
        return result[:-1], at

    # ---- body ----

    def process(self, statements: list[_Statement]) -> None:
        scopes = self.declare_labels(statements)
        scope = scopes[-1]
        for at, s in enumerate(statements):
            if s.kind == "code":
                self.code(s, scope)
            elif s.kind == "label":
                self.body.append(Label(scope.names[s.text], self.source.line(s.at)))
            elif s.kind == "{":
                scope = scopes[at]
            else:
                assert scope.parent is not None
                scope = scope.parent

    def declare_labels(self, statements: list[_Statement]) -> dict[int, _Scope]:
        """A scope for each ``{`` (by statement index; -1 is the body), its labels declared."""
        scope = _Scope(None, dict(self.globals))
        scopes = {-1: scope}
        for at, s in enumerate(statements):
            if s.kind == "{":
                scope = scopes[at] = _Scope(scope)
            elif s.kind == "}":
                assert scope.parent is not None
                scope = scope.parent
            elif s.kind == "label":
                self.declare(s.text, scope, s)
        return scopes

    def declare(self, name: str, scope: _Scope, s: _Statement) -> str:
        if name in scope.names:
            raise self.source.error(f"{name} is declared twice", s.at, s.text)
        self.taken[name] = count = self.taken.get(name, 0) + 1
        unique = name if count == 1 else f"{name}${count}"
        scope.names[name] = unique
        scope.operands.clear()
        return unique

    def code(self, s: _Statement, scope: _Scope) -> None:
        if s.text.startswith(".reg"):
            self.declare_registers(s, scope)
        elif s.text.startswith("."):
            variable = self.source.variable(s.text, s.at)
            unique = self.declare(variable.name, scope, s)
            self.variables.append(replace(variable, name=unique))
        else:
            self.body.append(self.instruction(s, scope))

    def declare_registers(self, s: _Statement, scope: _Scope) -> None:
        m = _REGISTERS.match(s.text)
        if not m or m[1]:
            raise self.source.error("not a register declaration", s.at, s.text)
        if m[2] != "pred" and m[2] not in TYPE_BYTES:
            raise self.source.error(f"unknown type .{m[2]}", s.at, s.text)
        if m[2].startswith("bf16"):
            wide = 8 * TYPE_BYTES[m[2]]
            raise self.source.error(f"registers for .{m[2]} are .b{wide}", s.at, s.text)
        for item in m[3].split(","):
            r = _RANGE.match(item.strip())
            if not r:
                raise self.source.error("not a register name", s.at, s.text)
            if r[2] and (len(r[2]) > 9 or int(r[2]) > _MOST_REGISTERS):
                most = f"at most {_MOST_REGISTERS:,} registers can be declared"
                raise self.source.error(most, s.at, s.text)
            names = [f"{r[1]}{i}" for i in range(int(r[2]))] if r[2] else [r[1]]
            for name in names:
                if _SPECIAL.match(name):
                    raise self.source.error(f"{name} is a special register", s.at, s.text)
                self.registers[self.declare(name, scope, s)] = m[2]

    def instruction(self, s: _Statement, scope: _Scope) -> Instruction:
        m = _INSTRUCTION.match(s.text)
        if not m:
            raise self.source.error("not an instruction", s.at, s.text)
        negated, guard, opcode, rest = m.groups()
        predicate = None
        if guard:
            found = scope.find(guard)
            if found is None or self.registers.get(found) != "pred":
                raise self.source.error(f"{guard} is not a predicate", s.at, s.text)
            predicate = Register(found, bool(negated))
        operands: list[Operand] = []
        at = 0
        while at < len(rest):
            o = _OPERAND.match(rest, at)
            if not o:
                raise self.source.error(f"cannot read operand {rest[at:]!r}", s.at, s.text)
            operands.append(self.operand(o[1].rstrip(), scope, s))
            at = o.end()
        return Instruction(
            opcode,
            tuple(opcode.split(".")),
            tuple(operands),
            predicate,
            self.source.line(s.at),
            s.text if "\n" not in s.text else " ".join(s.text.split()),
        )

    def operand(self, text: str, scope: _Scope, s: _Statement) -> Operand:
        found = scope.operands.get(text)
        if found is None:
            found = scope.operands[text] = self.read_operand(text, scope, s)
        return found

    def read_operand(self, text: str, scope: _Scope, s: _Statement) -> Operand:
        if not text:
            raise self.source.error("an operand is missing", s.at, s.text)
        if text[0] == "{":
            items = text[1:-1].split(",")
            return Vector(tuple(self.operand(item.strip(), scope, s) for item in items))
        if text[0] == "[":
            return self.address(text, scope, s)
        if "|" in text:
            first, second = text.split("|", 1)
            return Pair(
                self.operand(first.strip(), scope, s), self.operand(second.strip(), scope, s)
            )
        if text == "_":
            return Discard()
        if (value := constant(text)) is not None:
            return value
        if text[0] == "!":
            inner = self.name(text[1:].strip(), scope, s)
            if isinstance(inner, Register):
                return Register(inner.name, True)
        return self.name(text, scope, s)

    def name(self, text: str, scope: _Scope, s: _Statement) -> Register | Symbol:
        if not _NAME.match(text):
            raise self.source.error(f"cannot read operand {text!r}", s.at, s.text)
        found = scope.find(text)
        if found is not None:
            return Register(found) if found in self.registers else Symbol(found)
        if _SPECIAL.match(text):
            return Register(text)
        raise self.source.error(f"{text} is not declared", s.at, s.text)

    def address(self, text: str, scope: _Scope, s: _Statement) -> Address:
        m = _ADDRESS.match(text)
        if not m or (m[1] is None and m[2] is None):
            raise self.source.error(f"cannot read address {text}", s.at, s.text)
        offset = self.source.integer(m[2], s.at, s.text) if m[2] else 0
        return Address(self.name(m[1], scope, s) if m[1] else None, offset)
