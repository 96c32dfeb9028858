"""The check of an instruction's operands against the rules of its opcode, with its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.layout import SPECIALS
from urdir.driver.emulator.machine.operand_rules import FLOATS, Rule, Rules
from urdir.ptxgen.ptx import (
    TYPE_BYTES,
    Address,
    Discard,
    Entry,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

#: Names of an entry -> type of a register, "&" and state space of a variable or parameter.
Names = Mapping[str, str]

#: Special registers by their bytes; of %gridid ptxas takes the low half too.
_SPECIALS = {**{name: f"%{known.width}" for name, known in SPECIALS.items()}, "%gridid": "%"}


class OperandCheck:
    """The check of an entry's instructions. It remembers what each operand of the parser is."""

    def __init__(self, module: Module, entry: Entry) -> None:
        variables = {v.name: f"&{v.space}" for v in (*module.variables, *entry.variables)}
        parameters = {p.name: "&param" for p in entry.parameters}
        self._names: Names = {**_SPECIALS, **variables, **parameters, **entry.registers}
        self._kinds: dict[int, str] = {}

    def check(self, instruction: Instruction, rules: Rules) -> None:
        """Raise CompileError unless the operands are what the rules of the opcode allow."""
        operands, kinds = instruction.operands, self._kinds
        own = rules.get(len(operands))
        if own is None:
            many = " or ".join(map(str, sorted(rules)))
            what = f"wrong number of operands: {len(operands)}, {instruction.opcode} takes {many}"
            raise _error(instruction, what)
        for operand, rule in zip(operands, own, strict=True):
            kind = kinds.get(id(operand))
            if kind is None:
                kind = kinds[id(operand)] = kind_of(operand, self._names)
            if kind not in rule.surely and (why := _refusal(operand, rule, self._names)):
                raise _error(instruction, why)


def _error(instruction: Instruction, why: str) -> CompileError:
    return CompileError(f"PTX line {instruction.line}: {instruction.text}: {why}")


def kind_of(operand: Operand, names: Names) -> str:
    """What an operand is, as in `Rule.accepts`."""
    if isinstance(operand, Register):
        found = names.get(operand.name, "%unknown")
        return f"!{found}" if operand.negated else found
    if isinstance(operand, Address):
        return "@" if operand.base is None else f"@{kind_of(operand.base, names)}"
    if isinstance(operand, Immediate):
        return f"#{operand.kind}"
    if isinstance(operand, Symbol):
        return names.get(operand.name, "&label")
    return "_" if isinstance(operand, Discard) else type(operand).__name__.lower()


def _refusal(operand: Operand, rule: Rule, names: Names) -> str:
    """Why an operand is refused; empty if it is allowed."""
    if rule.space:
        return _address_refusal(operand, rule, names)
    if isinstance(operand, Vector):
        if rule.packed:
            return _packed_refusal(operand, rule.packed, names)
        if rule.vector is not None:
            return _vector_refusal(operand, rule.vector, names)
    elif rule.vector is not None and not rule.accepts:
        return f"{shown(operand)} must be a vector of {rule.vector.elements} in braces"
    if isinstance(operand, Pair) and rule.pair is not None:
        first, second = rule.pair
        return _refusal(operand.first, first, names) or _refusal(operand.second, second, names)
    kind = kind_of(operand, names)
    if kind not in rule.accepts:
        return f"{shown(operand)} is {described(kind)}; allowed here: {allowed(rule)}"
    if rule.values and isinstance(operand, Immediate) and not _is_within(operand, rule.values):
        return f"{operand.value} is out of range; allowed here: {_shown_values(rule.values)}"
    return ""


def _is_within(constant: Immediate, values: range | tuple[int, ...]) -> bool:
    if constant.kind == "int":
        return constant.value in values
    return values[0] < constant.value <= values[-1]


def _shown_values(values: range | tuple[int, ...]) -> str:
    if isinstance(values, tuple):
        return " or ".join(map(str, values))
    multiples = f"multiples of {values.step} from " if values.step > 1 else ""
    return f"{multiples}{values[0]} to {values[-1]}"


def _vector_refusal(operand: Vector, rule: Rule, names: Names) -> str:
    if len(operand.elements) != rule.elements:
        return f"{rule.elements} elements are needed, not {len(operand.elements)}"
    kinds = [kind_of(element, names) for element in operand.elements]
    for element, kind in zip(operand.elements, kinds, strict=True):
        if kind not in rule.accepts:
            return f"{shown(element)} is {described(kind)}; allowed here: {allowed(rule)}"
    return _mixed_refusal(kinds)


def _packed_refusal(operand: Vector, nbytes: int, names: Names) -> str:
    """Elements of mov: as wide together as the type, constants being as wide as needed."""
    kinds = [kind_of(element, names) for element in operand.elements]
    part = nbytes // len(kinds)
    sizes = {TYPE_BYTES.get(kind, 0) for kind in kinds if kind not in ("_", "#int")}
    if len(kinds) not in (2, 4) or part * len(kinds) != nbytes or sizes - {part}:
        return f"the elements are not {8 * nbytes} bits together"
    return _mixed_refusal(kinds)


def _mixed_refusal(kinds: Sequence[str]) -> str:
    """Elements of a vector have one width, and are not floats and integers."""
    types = {kind for kind in kinds if kind in TYPE_BYTES}
    if not types and "_" in kinds:
        return "every element is discarded"
    if len({TYPE_BYTES[t] for t in types}) > 1:
        return "elements of a vector must be equally wide"
    if types & FLOATS - {"f16x2"} and any(t[0] in "us" for t in types):
        return "elements of a vector must not be floats and integers"
    return ""


def _address_refusal(operand: Operand, rule: Rule, names: Names) -> str:
    if not isinstance(operand, Address):
        return f"{shown(operand)} is not an address: write [...]"
    if operand.base is None:
        return "a constant is an address only in .local memory: use a register or a variable"
    if kind_of(operand, names) in rule.accepts:
        return ""
    name, kind = operand.base.name, kind_of(operand.base, names)
    if kind[0] == "&" and kind != "&label":
        needed = f"needed is one in .{rule.space}"
        needed = f"say .{kind[1:]}" if rule.space == "generic" else needed
        return f"{name} is {described(kind)}: {needed}"
    if rule.space == "param":
        return f"ld.param takes [parameter+offset]; {name} is {described(kind)}"
    bits = "32 or 64" if "@b32" in rule.accepts else "64"
    return (
        f"{name} is {described(kind)} and cannot hold this address; needed is an integer or "
        f"untyped register of {bits} bits"
    )


def shown(operand: Operand) -> str:
    """An operand in a message."""
    if isinstance(operand, Register | Symbol):
        return f"{'!' if isinstance(operand, Register) and operand.negated else ''}{operand.name}"
    return str(operand.value) if isinstance(operand, Immediate) else _NOUNS[type(operand)]


_NOUNS: Mapping[type, str] = {Address: "[...]", Vector: "{...}", Pair: "d|p", Discard: "_"}
_KINDS: Mapping[str, str] = {
    "pred": "a predicate", "!pred": "a negated predicate", "#int": "an integer constant",
    "#f32": "a constant of .f32", "#f64": "a floating-point constant", "_": "a discarded result",
    "&label": "a label", "&param": "a parameter", "vector": "a vector",
    "pair": "a result with a predicate", "%": "a special register", "%4": "a special register",
    "%8": "a special register of 64 bits",
    "%unknown": "a special register that is not supported",
}  # fmt: skip


def described(kind: str) -> str:
    """A kind of operand in a message."""
    if kind in _KINDS:
        return _KINDS[kind]
    if kind[0] == "@":
        return "an address"
    return f"a variable in .{kind[1:]}" if kind[0] == "&" else f"a .{kind} register"


def allowed(rule: Rule) -> str:
    """What a rule accepts, in a message."""
    registers = [f".{t}" for t in TYPE_BYTES if t in rule.accepts]
    others = dict.fromkeys(_KINDS[kind] for kind in _KINDS if kind in rule.accepts)
    variables = ["a variable's address"] if any(k[0] == "&" for k in rule.accepts) else []
    parts = [f"{', '.join(registers)} registers"] if registers else []
    return " or ".join([*parts, *others, *variables]) or "d|p"
