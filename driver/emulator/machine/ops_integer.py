"""Integer, logic and byte instructions (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.layout import CARRY
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Operand, Register

_WIDE = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}


def _unsigned(element: str) -> str:
    return "u" + element[1]


@operation(r"(add|sub)\.([us](?:16|32|64))", "={2} {2} {2}")
def _add(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    element = _unsigned(NUMPY[m[2]])
    name = {"add": "add", "sub": "subtract"}[m[1]]
    left, right = e.source(a, element), e.source(b, element)
    e.line(f"{name}({left}, {right}, out={e.target(d, element)})")


@operation(r"(add|sub)\.(?:sat\.)s32", "=s32 s32 s32")
def _add_saturating(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    left, right, total = e.temp("i8"), e.temp("i8"), e.temp("i8")
    name = {"add": "add", "sub": "subtract"}[m[1]]
    e.line(f"{left}[...] = {e.source(a, 'i4')}; {right}[...] = {e.source(b, 'i4')}")
    e.line(f"{name}({left}, {right}, {total}); clip({total}, -2**31, 2**31 - 1, {total})")
    e.line(f"{e.target(d, 'i4')}[...] = {total}")


@operation(r"(add|addc|sub|subc)\.(cc\.)?([us](?:32|64))", "={3} {3} {3}")
def _carry(e: Emitter, m: re.Match[str]) -> None:
    """The carry flag is a hidden predicate register."""
    d, a, b = e.operands
    element = _unsigned(NUMPY[m[3]])
    left, right = e.full(a, element), e.source(b, element)
    carry = e.register(CARRY, "b1") if m[1].endswith("c") else ""
    first, out, extra = e.temp(element), e.temp("b1"), e.temp("b1")
    name, overflowed = ("add", "less") if m[1].startswith("add") else ("subtract", "greater")
    e.line(f"{name}({left}, {right}, {first}); {overflowed}({first}, {left}, {out})")
    result = first
    if m[1].endswith("c"):
        result, widened = e.temp(element), e.temp(element)
        e.line(f"{widened}[...] = {carry}; {name}({first}, {widened}, {result})")
        e.line(f"{overflowed}({result}, {first}, {extra}); logical_or({out}, {extra}, {out})")
    e.line(f"{e.target(d, element)}[...] = {result}")
    if m[2]:
        e.line(f"{e.target(Register(CARRY), 'b1')}[...] = {out}")


@operation(r"mul\.lo\.([us](?:16|32|64))", "={1} {1} {1}")
def _mul_lo(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    element = _unsigned(NUMPY[m[1]])
    left, right = e.source(a, element), e.source(b, element)
    e.line(f"multiply({left}, {right}, {e.target(d, element)})")


@operation(r"mad\.lo\.([us](?:16|32|64))", "={1} {1} {1} {1}")
def _mad_lo(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, c = e.operands
    element = _unsigned(NUMPY[m[1]])
    left, right, addend = (e.source(o, element) for o in (a, b, c))
    result = e.target(d, element, [c])
    e.line(f"multiply({left}, {right}, {result}); add({result}, {addend}, {result})")


def _wide(e: Emitter, operand: Operand, element: str) -> str:
    """The operand extended to twice its width."""
    wide = _WIDE[element]
    value = e.immediate(operand)
    if value is not None:
        bits = 8 * int(element[1])
        value &= (1 << bits) - 1
        if element[0] == "i" and value >> (bits - 1):
            value -= 1 << bits
        return e.constant(value, wide)
    result = e.temp(wide)
    e.line(f"{result}[...] = {e.source(operand, element)}")
    return result


@operation(r"(mul)\.wide\.(([us])16)", "={3}32 {2} {2}")
@operation(r"(mul)\.wide\.(([us])32)", "={3}64 {2} {2}")
@operation(r"(mad)\.wide\.(([us])16)", "={3}32 {2} {2} {3}32")
@operation(r"(mad)\.wide\.(([us])32)", "={3}64 {2} {2} {3}64")
def _mul_wide(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, *c = e.operands
    element = NUMPY[m[2]]
    wide = _WIDE[element]
    left, right = _wide(e, a, element), _wide(e, b, element)
    addend = e.source(c[0], wide) if m[1] == "mad" else ""
    result = e.target(d, wide, c)
    e.line(f"multiply({left}, {right}, {result})")
    if addend:
        e.line(f"add({result}, {addend}, {result})")


@operation(r"(mul)\.hi\.([us](?:16|32|64))", "={2} {2} {2}")
@operation(r"(mad)\.hi\.([us](?:16|32|64))", "={2} {2} {2} {2}")
def _mul_hi(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, *c = e.operands
    element = NUMPY[m[2]]
    addend = e.source(c[0], element) if m[1] == "mad" else ""
    if element[1] == "8":
        product = f"mul_hi_64({e.full(a, element)}, {e.full(b, element)})"
    else:
        wide = e.temp(_WIDE[element])
        left, right = _wide(e, a, element), _wide(e, b, element)
        bits = e.constant(8 * int(element[1]), _WIDE[element])
        e.line(f"multiply({left}, {right}, {wide}); right_shift({wide}, {bits}, {wide})")
        product = wide
    result = e.target(d, element, c)
    e.line(f"{result}[...] = {product}")
    if addend:
        e.line(f"add({result}, {addend}, {result})")


@operation(r"(mul24)\.lo\.([us]32)", "={2} {2} {2}")
@operation(r"(mad24)\.lo\.([us]32)", "={2} {2} {2} {2}")
def _mul24(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, *c = e.operands
    element, eight = NUMPY[m[2]], e.constant(8, NUMPY[m[2]])
    left, right = e.temp(element), e.temp(element)
    for name, operand in ((left, a), (right, b)):
        e.line(f"left_shift({e.source(operand, element)}, {eight}, {name})")
        e.line(f"right_shift({name}, {eight}, {name})")
    addend = e.source(c[0], element) if c else ""
    result = e.target(d, element, c)
    e.line(f"multiply({left}, {right}, {result})")
    if addend:
        e.line(f"add({result}, {addend}, {result})")


@operation(r"(div|rem)\.([us](?:16|32|64))", "={2} {2} {2}")
def _divide(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    element = NUMPY[m[2]]
    left, right = e.source(a, element), e.source(b, element)
    result = e.target(d, element)
    if m[1] == "rem":
        e.line(f"fmod({left}, {right}, {result})")
    elif element[0] == "u":
        e.line(f"floor_divide({left}, {right}, {result})")
    else:
        e.line(f"{result}[...] = divide_toward_zero({left}, {right})")


@operation(r"(neg|abs)\.(s(?:16|32|64))", "={2} {2}")
def _neg(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    element = NUMPY[m[2]]
    name = {"neg": "negative", "abs": "absolute"}[m[1]]
    e.line(f"{name}({e.source(a, element)}, {e.target(d, element)})")


@operation(r"(min|max)\.([us](?:16|32|64))", "={2} {2} {2}")
def _min(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    element = NUMPY[m[2]]
    left, right = e.source(a, element), e.source(b, element)
    name = {"min": "minimum", "max": "maximum"}[m[1]]
    e.line(f"{name}({left}, {right}, out={e.target(d, element)})")


@operation(r"sad\.([us](?:16|32|64))", "={1} {1} {1} {1}")
def _sad(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, c = e.operands
    element = NUMPY[m[1]]
    left, right, addend = (e.source(o, element) for o in (a, b, c))
    low, result = e.temp(element), e.target(d, element, [a, b, c])
    e.line(f"maximum({left}, {right}, out={result}); minimum({left}, {right}, out={low})")
    e.line(f"subtract({result}, {low}, {result}); add({result}, {addend}, {result})")


@operation(r"(popc|clz)\.(b32|b64)", "=i32 {2}")
def _count_bits(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    element = _unsigned(NUMPY[m[2]])
    source = e.full(a, element)
    name = {"popc": "bitwise_count", "clz": "leading_zeros"}[m[1]]
    e.line(f"{e.target(d, 'u4')}[...] = {name}({source})")


@operation(r"bfind(\.shiftamt)?\.([us]32|[us]64)", "=i32 {2}")
def _bfind(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    source = e.full(a, NUMPY[m[2]])
    e.line(f"{e.target(d, 'u4')}[...] = find_bit({source}, {bool(m[1])})")


@operation(r"brev\.(b32|b64)", "={1} {1}")
def _brev(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    element = NUMPY[m[1]]
    e.line(f"{e.target(d, element)}[...] = reverse_bits({e.full(a, element)})")


@operation(r"bfe\.([us](?:32|64))", "={1} {1} i32#0..255 i32#0..255")
def _bfe(e: Emitter, m: re.Match[str]) -> None:
    d, a, position, length = e.operands
    element = NUMPY[m[1]]
    bits = 8 * int(element[1])
    at, size = e.immediate(position), e.immediate(length)
    if at is None or size is None or not 0 < size <= bits - at:
        fields = f"{e.source(position, 'u4')}, {e.source(length, 'u4')}"
        result = f"extract_bits({e.full(a, element)}, {fields})"
        e.line(f"{e.target(d, element)}[...] = {result}")
        return
    source, result = e.source(a, element), e.target(d, element)
    if element[0] == "u":
        mask = e.constant((1 << size) - 1, element)
        if at:
            e.line(f"right_shift({source}, {e.constant(at, element)}, {result})")
            source = result
        if at + size < bits:
            e.line(f"bitwise_and({source}, {mask}, {result})")
        elif not at:
            e.line(f"{result}[...] = {source}")
    else:
        e.line(f"left_shift({source}, {e.constant(bits - size - at, element)}, {result})")
        e.line(f"right_shift({result}, {e.constant(bits - size, element)}, {result})")


@operation(r"bfi\.(b32|b64)", "={1} {1} {1} i32#0..255 i32#0..255")
def _bfi(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, position, length = e.operands
    element = NUMPY[m[1]]
    arguments = (
        f"{e.full(a, element)}, {e.full(b, element)}, "
        f"{e.source(position, 'u4')}, {e.source(length, 'u4')}"
    )
    e.line(f"{e.target(d, element)}[...] = insert_bits({arguments})")


@operation(r"(and|or|xor)\.(pred|b16|b32|b64)", "={2} {2} {2}")
def _logic(e: Emitter, m: re.Match[str]) -> None:
    d, a, b = e.operands
    element = NUMPY[m[2]]
    left, right = e.source(a, element), e.source(b, element)
    e.line(f"bitwise_{m[1]}({left}, {right}, {e.target(d, element)})")


@operation(r"(not)\.(pred|b16|b32|b64)", "={2} {2}")
@operation(r"(cnot)\.(b16|b32|b64)", "={2} {2}")
def _not(e: Emitter, m: re.Match[str]) -> None:
    d, a = e.operands
    element = NUMPY[m[2]]
    source = e.source(a, element)
    if m[1] == "not":
        e.line(f"invert({source}, {e.target(d, element)})")
    else:
        e.line(f"{e.target(d, element)}[...] = equal({source}, {e.constant(0, element)})")


@operation(r"(shl)\.(b16|b32|b64)", "={2} {2} i32")
@operation(r"(shr)\.([bus]16|[bus]32|[bus]64)", "={2} {2} i32")
def _shift(e: Emitter, m: re.Match[str]) -> None:
    """numpy, like PTX, gives 0 (or the sign) for amounts not below the width."""
    d, a, amount = e.operands
    element = NUMPY[m[2]]
    name = {"shl": "left_shift", "shr": "right_shift"}[m[1]]
    by = e.immediate(amount)
    if by is not None:
        shift = e.constant(min(by & 0xFFFFFFFF, 8 * int(element[1])), element)
    elif element[1] == "4":
        shift = e.source(amount, element)
    else:
        clamped, shift = e.temp("u4"), e.temp(element)
        e.line(f"minimum({e.source(amount, 'u4')}, {e.constant(64, 'u4')}, out={clamped})")
        e.line(f"{shift}[...] = {clamped}")
    e.line(f"{name}({e.source(a, element)}, {shift}, {e.target(d, element)})")


@operation(r"shf\.([lr])\.(wrap|clamp)\.b32", "=b32 b32 b32 i32")
def _funnel(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, amount = e.operands
    pair, high, shift = e.temp("u8"), e.temp("u8"), e.temp("u8")
    e.line(f"{pair}[...] = {e.source(b, 'u4')}; {high}[...] = {e.source(a, 'u4')}")
    e.line(
        f"left_shift({pair}, {e.constant(32, 'u8')}, {pair}); bitwise_or({pair}, {high}, {pair})"
    )
    e.line(f"{shift}[...] = {e.source(amount, 'u4')}")
    if m[2] == "wrap":
        e.line(f"bitwise_and({shift}, {e.constant(31, 'u8')}, {shift})")
    else:
        e.line(f"minimum({shift}, {e.constant(32, 'u8')}, out={shift})")
    if m[1] == "l":
        e.line(f"subtract({e.constant(32, 'u8')}, {shift}, {shift})")
    e.line(f"right_shift({pair}, {shift}, {pair}); {e.target(d, 'u4')}[...] = {pair}")


# Two-operand boolean functions by their truth table, bit 2a+b.
_TWO = {
    0x0: None, 0x1: "~({a} | {b})", 0x2: "~{a} & {b}", 0x3: "~{a}",
    0x4: "{a} & ~{b}", 0x5: "~{b}", 0x6: "{a} ^ {b}", 0x7: "~({a} & {b})",
    0x8: "{a} & {b}", 0x9: "~({a} ^ {b})", 0xA: "{b}", 0xB: "~{a} | {b}",
    0xC: "{a}", 0xD: "{a} | ~{b}", 0xE: "{a} | {b}", 0xF: "ones",
}  # fmt: skip


@operation(r"lop3\.b32", "=b32? b32 b32 b32 #")
def _lop3(e: Emitter, m: re.Match[str]) -> None:
    """``f0 ^ (c & (f0 ^ f1))``, f0 and f1 being the function of a and b for c = 0 and 1."""
    d, a, b, c, table = e.operands
    lut = e.number(table)
    f0 = sum(((lut >> (2 * i)) & 1) << i for i in range(4))
    f1 = sum(((lut >> (2 * i + 1)) & 1) << i for i in range(4))
    names = {"a": e.full(a, "u4"), "b": e.full(b, "u4")}
    third = e.full(c, "u4")
    result = e.target(d, "u4", [a, b, c])
    base, change = _TWO[f0], _TWO[f0 ^ f1]
    if base == "ones":
        base, always = None, "invert({0}, {0})"
    else:
        always = ""
    if change is None:
        text = base.format(**names) if base else e.constant(0, "u4")
    else:
        text = third if change == "ones" else f"{third} & ({change.format(**names)})"
        if base:
            text = f"({base.format(**names)}) ^ ({text})"
    e.line(f"{result}[...] = {text}")
    if always:
        e.line(always.format(result))


@operation(r"prmt\.b32\.(f4e|b4e|rc8|ecl|ecr|rc16)", "=b32 b32 b32 b32")
def _prmt_by_mode(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, place = e.operands
    selector = f"selectors({m[1]!r}, {e.full(place, 'u4')})"
    arguments = f"{e.full(a, 'u4')}, {e.full(b, 'u4')}, {selector}"
    e.line(f"{e.target(d, 'u4')}[...] = permute_bytes({arguments})")


@operation(r"prmt\.b32", "=b32 b32 b32 b32")
def _prmt(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, selector = e.operands
    value = e.immediate(selector)
    if value is None or value & 0x8888:
        arguments = ", ".join(e.full(o, "u4") for o in (a, b, selector))
        e.line(f"{e.target(d, 'u4')}[...] = permute_bytes({arguments})")
        return
    constants = [e.immediate(a), e.immediate(b)]
    known, copies = 0, []
    for at in range(4):
        byte = (value >> (4 * at)) & 7
        constant = constants[byte // 4]
        if constant is None:
            copies.append((at, (a, b)[byte // 4], byte % 4))
        else:
            known |= ((constant >> (8 * (byte % 4))) & 0xFF) << (8 * at)
    sources = {id(o): f"{e.full(o, 'u4')}.view(u1)" for o in (a, b) if e.immediate(o) is None}
    result = e.target(d, "u4", [a, b])
    if len(copies) < 4:
        e.line(f"{result}[...] = {e.constant(known, 'u4')}")
    for at, operand, byte in copies:
        e.line(f"{result}.view(u1)[{at}::4] = {sources[id(operand)]}[{byte}::4]")


@operation(r"(dp4a)()\.([us]32)\.([us]32)", "=i32 u32 u32 i32")
@operation(r"(dp2a)\.(lo|hi)\.([us]32)\.([us]32)", "=i32 u32 u32 i32")
def _dot(e: Emitter, m: re.Match[str]) -> None:
    d, a, b, c = e.operands
    left, right = e.full(a, "u4"), e.full(b, "u4")
    kinds = ", ".join({"u32": "u1", "s32": "i1"}[kind] for kind in (m[3], m[4]))
    if m[1] == "dp4a":
        dot = f"dot_4({left}, {right}, {kinds})"
    else:
        dot = f"dot_2({left}, {right}, {kinds}, {2 if m[2] == 'hi' else 0})"
    addend = e.source(c, "u4")
    e.line(f"add({dot}, {addend}, {e.target(d, 'u4')})")
