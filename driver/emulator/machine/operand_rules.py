"""What the operands of an instruction may be (PTX ISA 9.2 to 9.5, and what ptxas refuses).

An operation declares its operands as a signature: an item for each operand, in order. ``{1}`` is
the first group of the operation's pattern, nothing if it did not match.

| item | operand |
|---|---|
| ``s32`` | a register of an agreeing type, or a constant |
| ``=s32`` | the result: no constant, nothing negated |
| ``i32`` | ``u32`` without registers of .f16x2 |
| ``s32>`` | registers may be wider, as those of ld, st and cvt (9.4.1) |
| ``s32!`` | no constant |
| ``s32~`` | so may special registers; ``s32&`` also addresses of variables, ``s32&shared`` of those in .shared |
| ``=b32?`` | ``_`` discards the result |
| ``=b32|pred``, ``=b32|pred?`` | a result with its predicate, which may be missing |
| ``f32*4``, ``f32*1`` | a vector; ``b32/`` is one that is as wide as b32 together, or b32 itself |
| ``u64+f16x2*4`` | one or the other |
| ``[global]``, ``[global/32]`` | an address in a variable or register of 64 bits; of 32 too in .shared |
| ``label`` | a label |
| ``#`` ``#0..15`` ``#4,8,16`` | an integer constant; ``u32#0..64/16`` bounds constants of a u32: multiples of 16; of an f32: above the first |
| ``(u32)`` | an operand that may be missing |

``||`` separates signatures with different numbers of operands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from urdir.driver.emulator.machine.faults import CompileError
from urdir.driver.emulator.machine.layout import SPECIALS
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

Signature = str | Callable[[re.Match[str]], str]

#: Names of an entry -> type of a register, "&" and state space of a variable or parameter.
Names = Mapping[str, str]

_WITHOUT_REGISTERS = frozenset(("bf16", "bf16x2"))
_FLOATS = frozenset(("f16", "f32", "f64", "f16x2")) | _WITHOUT_REGISTERS


def _agreeing(kind: str) -> frozenset[str]:
    """Types of registers that agree with an instruction's type (table of PTX ISA 9.4).

    .bN agrees with all of its size. ptxas takes .f16x2 as an integer of 32 bits too.
    """
    if kind == "pred":
        return frozenset(("pred",))
    if kind == "i32":
        return _agreeing("u32") - {"f16x2"}
    size = TYPE_BYTES[kind]
    same = {t for t in TYPE_BYTES if TYPE_BYTES[t] == size and t not in _WITHOUT_REGISTERS}
    if kind[0] == "b" and kind[1] != "f":
        return frozenset(same)
    if kind in _FLOATS:
        return frozenset({f"b{8 * size}", kind} & same)
    return frozenset(same - _FLOATS | ({"f16x2"} if size == 4 else set()))


def _wider(kind: str) -> frozenset[str]:
    """The same for operands that may be wider: integers and bits in any, floats in bits."""
    found = set(_agreeing(kind))
    for wide in ("16", "32", "64"):
        if int(wide) // 8 > TYPE_BYTES[kind]:
            integer = kind[0] in "us"
            found |= {f"b{wide}"} if kind in _FLOATS else _agreeing(f"{'u' if integer else 'b'}{wide}")
    return frozenset(found)


def _constants(kind: str) -> frozenset[str]:
    """Constants that an operand may be: "#int", "#f32" or "#f64"."""
    if kind in ("f32", "f64"):
        return frozenset(("#f32", "#f64"))
    if kind in _FLOATS:
        return frozenset()
    return frozenset(("#int", f"#f{kind[1:]}") if kind in ("b32", "b64") else ("#int",))


@dataclass(frozen=True, slots=True)
class Rule:
    """What one operand may be: ``accepts`` has types of registers and other kinds of operands."""

    item: str
    accepts: frozenset[str] = frozenset()
    #: Values of a constant; empty: any.
    values: range | tuple[int, ...] = ()
    #: The rule of a vector's elements, if it may be one, and their number.
    vector: Rule | None = None
    elements: int = 0
    #: Bytes of the elements of any vector together, which need not agree by themselves.
    packed: int = 0
    #: State space of an address; "/32": its registers may have 32 bits.
    space: str = ""
    pair: Rule | None = None


#: Number of operands -> their rules.
Rules = Mapping[int, Sequence[Rule]]


def names_of(module: Module, entry: Entry) -> dict[str, str]:
    """The names that operands of an entry may have."""
    names = {v.name: f"&{v.space}" for v in (*module.variables, *entry.variables)}
    names |= {p.name: "&param" for p in entry.parameters}
    names |= {name: f"%{known.width}" for name, known in SPECIALS.items()}
    names["%gridid"] = "%"  # ptxas takes its low half too
    return names | dict(entry.registers)


def rules_of(signature: Signature, match: re.Match[str] | None = None) -> Rules:
    """The rules of an opcode's operands; ``match`` is that of its pattern."""
    text = signature if isinstance(signature, str) else signature(match)
    if match is not None:
        for number, group in enumerate(match.groups(), 1):
            text = text.replace(f"{{{number}}}", group or "")
    found = {}
    for alternative in text.split("||"):
        items = alternative.split()
        while True:
            found[len(items)] = tuple(_rule(item.strip("()")) for item in items)
            optional = [at for at, item in enumerate(items) if item[0] == "("]
            if not optional:
                break
            del items[optional[-1]]
    return found


@functools.lru_cache(maxsize=1 << 10)
def _rule(item: str) -> Rule:
    if item[0] == "[":
        return Rule(item, space=_space(item[1:-1]))
    if "+" in item:
        scalar, vector = item.split("+")
        return replace(_rule(scalar), vector=_rule(vector).vector)
    if item == "label":
        return Rule(item, frozenset(("&label",)))
    result, text = item[0] == "=", item.removeprefix("=")
    text, _, values = text.partition("#")
    bounds: range | tuple[int, ...] = ()
    if ".." in values:
        low, high, step = re.fullmatch(r"(\d+)\.\.(\d+)(?:/(\d+))?", values).groups()  # type: ignore[union-attr]
        bounds = range(int(low), int(high) + 1, int(step or 1))
    elif values:
        bounds = tuple(map(int, values.split(",")))
    if not text:
        return Rule(item, frozenset(("#int",)), bounds)
    first, bar, second = text.partition("|")
    if bar:
        alone = _rule(f"={first}").accepts if second.endswith("?") else frozenset()
        return Rule(item, alone, pair=_rule(f"={second}"))
    m = re.fullmatch(r"(\w+)([>~?/!]*)(&?)(\w*)(?:\*(\d+))?", text)
    assert m, item
    kind, marks, variables, space, count = m.groups()
    accepts = _accepted(kind, marks, result)
    if variables:
        spaces = [space] if space else ["shared", "global", "const"][: TYPE_BYTES[kind] // 2 - 1]
        accepts |= {f"&{each}" for each in spaces}
    packed = TYPE_BYTES[kind] if "/" in marks else 0
    if count:
        return Rule(item, vector=Rule(item, accepts, elements=int(count)))
    return Rule(item, accepts, bounds, packed=packed)


def _space(text: str) -> str:
    """The state space that an opcode names: shared::cta is shared, none is generic."""
    return "shared" if text.startswith("shared") else text or "generic"


def _accepted(kind: str, marks: str, result: bool) -> frozenset[str]:
    if kind == "_":
        return frozenset("_")
    accepts = set(_wider(kind) if ">" in marks else _agreeing(kind))
    if not result:
        accepts |= _constants(kind) if "!" not in marks else set()
        accepts |= {"!pred"} if kind == "pred" else set()
    elif "?" in marks:
        accepts.add("_")
    size = TYPE_BYTES.get(kind, 0)
    if "~" in marks:
        wide = {f"%{other}" for other in (4, 8) if ">" in marks and other > size}
        accepts |= wide | {f"%{max(4, size)}", "%"}
    return frozenset(accepts)


def check(instruction: Instruction, rules: Rules, names: Names) -> None:
    """Raise CompileError unless the operands are what the rules allow."""
    operands = instruction.operands
    own = rules.get(len(operands))
    if own is None:
        many = " or ".join(map(str, sorted(rules)))
        what = f"wrong number of operands: {len(operands)}, {instruction.opcode} takes {many}"
        raise _error(instruction, what)
    for operand, rule in zip(operands, own, strict=True):
        is_plain = type(operand) is Register and not operand.negated
        if is_plain and names.get(operand.name) in rule.accepts:  # type: ignore[union-attr]
            continue
        if why := _refusal(operand, rule, names):
            raise _error(instruction, why)


def _error(instruction: Instruction, why: str) -> CompileError:
    return CompileError(f"PTX line {instruction.line}: {instruction.text}: {why}")


def kind_of(operand: Operand, names: Names) -> str:
    """What an operand is, as in `Rule.accepts`."""
    if isinstance(operand, Register):
        found = names.get(operand.name, "%unknown")
        return f"!{found}" if operand.negated else found
    if isinstance(operand, Immediate):
        return f"#{operand.kind}"
    if isinstance(operand, Symbol):
        return names.get(operand.name, "&label")
    return "_" if isinstance(operand, Discard) else type(operand).__name__.lower()


def _refusal(operand: Operand, rule: Rule, names: Names) -> str:
    """Why an operand is refused; empty if it is allowed."""
    if rule.space:
        return _address_refusal(operand, rule.space, names)
    if isinstance(operand, Vector):
        if rule.packed:
            return _packed_refusal(operand, rule.packed, names)
        if rule.vector is not None:
            return _vector_refusal(operand, rule.vector, names)
    elif rule.vector is not None and not rule.accepts:
        return f"{shown(operand)} must be a vector of {rule.vector.elements} in braces"
    if isinstance(operand, Pair) and rule.pair is not None:
        first = _rule(f"={rule.item.strip('=').partition('|')[0]}")
        return _refusal(operand.first, first, names) or _refusal(operand.second, rule.pair, names)
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
    if types & _FLOATS - {"f16x2"} and any(t[0] in "us" for t in types):
        return "elements of a vector must not be floats and integers"
    return ""


def _address_refusal(operand: Operand, space: str, names: Names) -> str:
    if not isinstance(operand, Address):
        return f"{shown(operand)} is not an address: write [...]"
    if operand.base is None:
        return "a constant is an address only in .local memory: use a register or a variable"
    name, kind = operand.base.name, kind_of(operand.base, names)
    space, _, bits = space.partition("/")
    if kind[0] == "&":
        fits = kind[1:] == space or (space == "generic" and kind in ("&global", "&const"))
        opcode = "a generic address is needed" if space == "generic" else f"needed is .{space}"
        return "" if fits else f"{name} is {described(kind)}, {opcode}"
    if space == "param":
        return f"ld.param takes [parameter+offset]; {name} is {described(kind)}"
    if kind in ("b64", "u64", "s64"):
        return ""
    short = bits == "32" or (space == "shared" and not bits)
    if short and kind in ("b32", "u32", "s32"):
        return ""
    return (
        f"{name} cannot hold this address: it is {described(kind)}; needed is an integer or "
        f"untyped register of {'32 or 64' if short else '64'} bits"
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
    "&label": "a label", "&param": "a parameter", "address": "an address", "vector": "a vector",
    "pair": "a result with a predicate", "%": "a special register", "%4": "a special register",
    "%8": "a special register of 64 bits",
    "%unknown": "a special register that is not supported",
}  # fmt: skip


def described(kind: str) -> str:
    """A kind of operand in a message."""
    if kind in _KINDS:
        return _KINDS[kind]
    return f"a variable in .{kind[1:]}" if kind[0] == "&" else f"a .{kind} register"


def allowed(rule: Rule) -> str:
    """What a rule accepts, in a message."""
    registers = [f".{t}" for t in TYPE_BYTES if t in rule.accepts]
    others = [_KINDS[kind] for kind in _KINDS if kind in rule.accepts]
    variables = ["a variable's address"] if any(k[0] == "&" for k in rule.accepts) else []
    parts = [f"{', '.join(registers)} registers"] if registers else []
    return " or ".join([*parts, *others, *variables]) or "d|p"
