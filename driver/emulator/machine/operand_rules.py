"""What the operands of an instruction may be: signatures of the table of operations, as rules.

After PTX ISA 9.2 to 9.5, and what ptxas refuses. A signature has an item for each operand, in
order; ``{1}`` is the first group of the operation's pattern, nothing if it did not match.

| item | operand |
|---|---|
| ``s32`` | a register of an agreeing type, or a constant; ``s32!``: no constant |
| ``=s32`` | the result: no constant, nothing negated; ``=s32?``: ``_`` discards it |
| ``i32`` | ``u32`` without registers of .f16x2 |
| ``s32>`` | registers may be wider, as those of ld, st and cvt (9.4.1) |
| ``s32~`` | also a special register |
| ``u32&``, ``u32&shared`` | also the address of a variable; of one in .shared |
| ``=b32|pred``, ``=b32|pred?`` | a result with its predicate; which may be missing |
| ``f32*4`` | a vector of four; ``u64+f16x2*4``: or a u64 |
| ``b32/`` | also a vector as wide as b32 |
| ``[global]``, ``[shared]`` | an address in this state space; none: a generic one |
| ``[global/32]``, ``[shared/64]`` | ... in registers of 32 bits too; of 64 bits only |
| ``label`` | a label |
| ``#``, ``#0..64/16``, ``#4,8`` | an integer constant; a multiple of 16; one of two |
| ``u32#0..15`` | constants are bounded; those of f32 are above the first |
| ``(u32)`` | an operand that may be missing |

``||`` separates signatures with different numbers of operands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from urdir.ptxgen.ptx import TYPE_BYTES

Signature = str | Callable[[re.Match[str]], str]

_WITHOUT_REGISTERS = frozenset(("bf16", "bf16x2"))
FLOATS = frozenset(("f16", "f32", "f64", "f16x2")) | _WITHOUT_REGISTERS


@dataclass(frozen=True)
class Rule:
    """What one operand may be.

    ``accepts`` has types of registers, "%" and bytes of special registers, "#" and kinds of
    constants, "&" and state spaces of variables, "@" and the base of an address, "!pred" and "_":
    see `kind_of`.
    """

    item: str
    accepts: frozenset[str] = frozenset()
    #: Values of a constant; empty: any.
    values: range | tuple[int, ...] = ()
    #: The rule of a vector's elements, if it may be one, and their number.
    vector: Rule | None = None
    elements: int = 0
    #: Bytes of the elements of any vector together, which need not agree by themselves.
    packed: int = 0
    #: State space of an address.
    space: str = ""
    #: The rules of a result and its predicate.
    pair: tuple[Rule, Rule] | None = None

    @functools.cached_property
    def surely(self) -> frozenset[str | None]:
        """What is accepted whatever its value is."""
        return frozenset(kind for kind in self.accepts if not self.values or kind[0] != "#")


#: Number of operands -> their rules.
Rules = Mapping[int, Sequence[Rule]]


def rules_of(signature: str, groups: Sequence[str | None] = ()) -> Rules:
    """The rules of an opcode's operands; ``groups`` are those of its pattern."""
    for number, group in enumerate(groups, 1):
        signature = signature.replace(f"{{{number}}}", group or "")
    found = {}
    for alternative in signature.split("||"):
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
        return _address(item)
    if item == "label":
        return Rule(item, frozenset(("&label",)))
    if "+" in item:
        scalar, vector = item.split("+")
        return replace(_rule(scalar), vector=_rule(vector).vector)
    if "|" in item:
        first, second = item.split("|")
        both = _rule(first), _rule(f"={second}")
        return Rule(item, both[0].accepts if second[-1] == "?" else frozenset(), pair=both)
    text, _, values = item.removeprefix("=").partition("#")
    if not text:
        return Rule(item, frozenset(("#int",)), _bounds(values))
    m = re.fullmatch(r"(\w+)([>~?/!]*)(&?)(\w*)(?:\*(\d+))?", text)
    assert m, item
    kind, marks, variables, space, count = m.groups()
    accepts = _accepted(kind, marks, is_result=item[0] == "=")
    if variables:
        spaces = [space] if space else ["shared", "global", "const"][: TYPE_BYTES[kind] // 2 - 1]
        accepts |= {f"&{each}" for each in spaces}
    if count:
        return Rule(item, vector=Rule(item, accepts, elements=int(count)))
    return Rule(item, accepts, _bounds(values), packed=TYPE_BYTES[kind] if "/" in marks else 0)


def _address(item: str) -> Rule:
    space, _, bits = item[1:-1].partition("/")
    space = "shared" if space.startswith("shared") else space or "generic"
    spaces = ("global", "const") if space == "generic" else (space,)
    is_short = bits == "32" or (space == "shared" and not bits)
    registers = "" if space == "param" else "b64 u64 s64 b32 u32 s32" if is_short else "b64 u64 s64"
    bases = [f"&{each}" for each in spaces] + registers.split()
    return Rule(item, frozenset(f"@{base}" for base in bases), space=space)


def _bounds(text: str) -> range | tuple[int, ...]:
    m = re.fullmatch(r"(\d+)\.\.(\d+)(?:/(\d+))?", text)
    if m:
        return range(int(m[1]), int(m[2]) + 1, int(m[3] or 1))
    return tuple(map(int, text.split(","))) if text else ()


def _accepted(kind: str, marks: str, is_result: bool) -> frozenset[str]:
    if kind == "_":
        return frozenset("_")
    accepts = set(_wider(kind) if ">" in marks else _agreeing(kind))
    if is_result:
        accepts |= {"_"} if "?" in marks else set()
    else:
        accepts |= _constants(kind) if "!" not in marks else set()
        accepts |= {"!pred"} if kind == "pred" else set()
    if "~" in marks:
        size = TYPE_BYTES[kind]
        accepts |= {f"%{wide}" for wide in (4, 8) if ">" in marks and wide > size}
        accepts |= {f"%{max(4, size)}", "%"}
    return frozenset(accepts)


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
    if kind in FLOATS:
        return frozenset({f"b{8 * size}", kind} & same)
    return frozenset(same - FLOATS | ({"f16x2"} if size == 4 else set()))


def _wider(kind: str) -> frozenset[str]:
    """The same for operands that may be wider: integers and bits in any, floats in bits."""
    found = set(_agreeing(kind))
    letter = "u" if kind[0] in "us" else "b"
    for bits in (16, 32, 64):
        if bits > 8 * TYPE_BYTES[kind]:
            found |= {f"b{bits}"} if kind in FLOATS else _agreeing(f"{letter}{bits}")
    return frozenset(found)


def _constants(kind: str) -> frozenset[str]:
    """Constants that an operand may be: "#int", "#f32" or "#f64"."""
    if kind in ("f32", "f64"):
        return frozenset(("#f32", "#f64"))
    if kind in FLOATS:
        return frozenset()
    return frozenset(("#int", f"#f{kind[1:]}") if kind in ("b32", "b64") else ("#int",))
