"""Integer, logic, comparison and selection instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]
N = 192


def values(rng: np.random.Generator, bits: int, signed: bool, count: int = N) -> Array:
    """Random words of all magnitudes, and the edges."""
    raw = rng.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + rng.integers(
        0, 2, count, dtype=np.uint64
    )
    raw >>= rng.integers(0, 64, count, dtype=np.uint64)
    edges = [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 31, 32, 33]
    raw[: len(edges)] = edges
    rng.shuffle(raw)
    return raw.astype(f"u{bits // 8}").view(f"{'i' if signed else 'u'}{bits // 8}")


def wrap(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def lanes(function: Callable[..., int], bits: int, *inputs: Array) -> Array:
    """The function of Python integers, lane by lane, as unsigned words."""
    rows = zip(*(x.tolist() for x in inputs), strict=True)
    return np.array([wrap(int(function(*row)), bits) for row in rows], f"u{bits // 8}")


BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: (a * b) >> n,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
    "div": lambda a, b, n: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem": lambda a, b, n: abs(a) % abs(b) * (-1 if a < 0 else 1),
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(machine: Any, rng: Any, name: str, kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    a, b = values(rng, bits, signed), values(rng, bits, signed)
    if name in ("div", "rem"):
        b[b == 0] = 3
        if signed:
            b[b == -1] = 7
    want = lanes(lambda x, y: BINARY[name](x, y, bits), bits, a, b)
    machine.check(f"{name}.{kind} %d, %a, %b;", f"u{bits // 8}", want, a, b)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_mad_sad_neg_abs(machine: Any, rng: Any, kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    a, b, c = (values(rng, bits, signed) for _ in range(3))
    out = f"u{bits // 8}"
    machine.check(
        f"mad.lo.{kind} %d, %a, %b, %c;", out, lanes(lambda x, y, z: x * y + z, bits, a, b, c),
        a, b, c,
    )  # fmt: skip
    machine.check(
        f"mov.b{bits} %d, %c; mad.lo.{kind} %d, %a, %b, %d;", out,
        lanes(lambda x, y, z: x * y + z, bits, a, b, c), a, b, c,
    )  # fmt: skip
    machine.check(
        f"sad.{kind} %d, %a, %b, %c;", out, lanes(lambda x, y, z: abs(x - y) + z, bits, a, b, c),
        a, b, c,
    )  # fmt: skip
    if signed:
        machine.check(f"neg.{kind} %d, %a;", out, lanes(lambda x: -x, bits, a), a)
        machine.check(f"abs.{kind} %d, %a;", out, lanes(abs, bits, a), a)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide(machine: Any, rng: Any, kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    a, b = values(rng, bits, signed), values(rng, bits, signed)
    c = values(rng, 2 * bits, signed)
    out = f"u{bits // 4}"
    machine.check(
        f"mul.wide.{kind} %d, %a, %b;", out, lanes(lambda x, y: x * y, 2 * bits, a, b), a, b
    )
    machine.check(
        f"mul.wide.{kind} %d, %a, 40503;", out,
        lanes(lambda x: x * (40503 if not signed or bits > 16 else 40503 - 65536), 2 * bits, a), a,
    )  # fmt: skip
    machine.check(
        f"mad.wide.{kind} %d, %a, %b, %c;", out,
        lanes(lambda x, y, z: x * y + z, 2 * bits, a, b, c), a, b, c,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_shifts(machine: Any, rng: Any, bits: int) -> None:
    """Amounts are clamped to the width."""
    u, s = values(rng, bits, False), values(rng, bits, True)
    amount = rng.integers(0, 80, N).astype("u4")
    amount[:4] = [2**32 - 1, 2**31, 64, 32]
    out = f"u{bits // 8}"
    left = lanes(lambda x, k: x << min(k, bits), bits, u, amount)
    machine.check(f"shl.b{bits} %d, %a, %b;", out, left, u, amount)
    right = lanes(lambda x, k: x >> min(k, bits), bits, u, amount)
    machine.check(f"shr.u{bits} %d, %a, %b;", out, right, u, amount)
    signed = lanes(lambda x, k: x >> min(k, bits), bits, s, amount)
    machine.check(f"shr.s{bits} %d, %a, %b;", out, signed, s, amount)
    machine.check(f"shl.b{bits} %d, %a, 5;", out, lanes(lambda x: x << 5, bits, u), u)
    machine.check(f"shr.s{bits} %d, %a, 99;", out, lanes(lambda x: x >> bits, bits, s), s)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(machine: Any, rng: Any, mode: str) -> None:
    a, b = values(rng, 32, False), values(rng, 32, False)
    k = rng.integers(0, 70, N).astype("u4")

    def amount(x: int) -> int:
        return x & 31 if mode == "wrap" else min(x, 32)

    left = lanes(lambda x, y, z: ((y << 32 | x) << amount(z)) >> 32, 32, a, b, k)
    machine.check(f"shf.l.{mode}.b32 %d, %a, %b, %c;", "u4", left, a, b, k)
    right = lanes(lambda x, y, z: (y << 32 | x) >> amount(z), 32, a, b, k)
    machine.check(f"shf.r.{mode}.b32 %d, %a, %b, %c;", "u4", right, a, b, k)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_counting(machine: Any, rng: Any, bits: int) -> None:
    a = values(rng, bits, False)
    machine.check(f"popc.b{bits} %d, %a;", "u4", lanes(lambda x: x.bit_count(), 32, a), a)
    machine.check(f"clz.b{bits} %d, %a;", "u4", lanes(lambda x: bits - x.bit_length(), 32, a), a)
    machine.check(f"bfind.u{bits} %d, %a;", "u4",
                  lanes(lambda x: (x.bit_length() - 1) % 2**32, 32, a), a)  # fmt: skip
    high = 1 << bits - 1
    machine.check(f"bfind.shiftamt.s{bits} %d, %a;", "u4", lanes(
        lambda x: bits - length if (length := (x ^ (-(x >> bits - 1) % (2 * high))).bit_length())
        else 2**32 - 1, 32, a), a)  # fmt: skip
    reverse = lanes(lambda x: int(f"{x:0{bits}b}"[::-1], 2), bits, a)
    machine.check(f"brev.b{bits} %d, %a;", f"u{bits // 8}", reverse, a)


def extract(value: int, at: int, size: int, bits: int, signed: bool) -> int:
    """The pseudo code of bfe in the PTX ISA."""
    at, size = at & 0xFF, size & 0xFF
    sign = 0
    if signed and size:
        sign = (value >> min(at + size - 1, bits - 1)) & 1
    result = 0
    for i in range(bits):
        bit = (value >> (at + i)) & 1 if i < size and at + i < bits else sign
        result |= bit << i
    return result


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(machine: Any, rng: Any, kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    a = values(rng, bits, False)
    at, size = (rng.integers(0, bits + 8, N).astype("u4") for _ in range(2))
    want = lanes(lambda x, p, n: extract(x, p, n, bits, signed), bits, a, at, size)
    machine.check(f"bfe.{kind} %d, %a, %b, %c;", f"u{bits // 8}", want, a, at, size)
    for p, n in ((0, 4), (4, 4), (bits - 8, 8), (0, bits), (3, 0), (bits - 4, 9)):
        want = lanes(lambda x, p=p, n=n: extract(x, p, n, bits, signed), bits, a)
        machine.check(f"bfe.{kind} %d, %a, {p}, {n};", f"u{bits // 8}", want, a)


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi(machine: Any, rng: Any, bits: int) -> None:
    a, b = values(rng, bits, False), values(rng, bits, False)
    at = rng.integers(0, bits + 4, N).astype("u4")
    for size in (0, 1, 8, bits, bits + 3):
        mask = [((1 << min(size, bits)) - 1) << p for p in at.tolist()]
        full = (1 << bits) - 1
        want = np.array(
            [(y & ~m | (x << p) & m) & full
             for x, y, p, m in zip(a.tolist(), b.tolist(), at.tolist(), mask, strict=True)],
            f"u{bits // 8}",
        )  # fmt: skip
        machine.check(f"bfi.b{bits} %d, %a, %b, %c, {size};", f"u{bits // 8}", want, a, b, at)


@pytest.mark.parametrize("name", ["and", "or", "xor"])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(machine: Any, rng: Any, name: str, bits: int) -> None:
    a, b = values(rng, bits, False), values(rng, bits, False)
    function = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}
    out = f"u{bits // 8}"
    machine.check(f"{name}.b{bits} %d, %a, %b;", out, lanes(function[name], bits, a, b), a, b)
    machine.check(f"not.b{bits} %d, %a;", out, lanes(lambda x: ~x, bits, a), a)
    machine.check(f"cnot.b{bits} %d, %a;", out, lanes(lambda x: x == 0, bits, a), a)


def test_lop3_all_tables(machine: Any, rng: Any) -> None:
    a, b, c = (values(rng, 32, False, 64) for _ in range(3))
    for lut in range(256):
        code = f"lop3.b32 %d, %a, %b, %c, {lut};"
        want = np.zeros(64, "u4")
        for i in range(8):
            if lut >> i & 1:
                term = [x if i >> (2 - j) & 1 else ~x for j, x in enumerate((a, b, c))]
                want |= term[0] & term[1] & term[2]
        got = machine.evaluate(code, "u4", a, b, c)
        assert (got == want).all(), lut


def test_prmt(machine: Any, rng: Any) -> None:
    a, b = values(rng, 32, False), values(rng, 32, False)
    selector = rng.integers(0, 1 << 16, N).astype("u4")

    def permute(x: int, y: int, s: int) -> int:
        data = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        result = 0
        for i in range(4):
            nibble = s >> (4 * i) & 15
            byte = data[nibble & 7]
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << (8 * i)
        return result

    want = lanes(permute, 32, a, b, selector)
    machine.check("prmt.b32 %d, %a, %b, %c;", "u4", want, a, b, selector)
    for mode, byte in (  # by the names of the modes: forward, backward, replicate, edge, ...
        ("f4e", lambda c, i: c + i), ("b4e", lambda c, i: (c - i) % 8), ("rc8", lambda c, i: c),
        ("ecl", max), ("ecr", min), ("rc16", lambda c, i: 2 * (c % 2) + i % 2),
    ):  # fmt: skip
        rows = [sum(byte(c, i) << 4 * i for i in range(4)) for c in range(4)]
        want = lanes(lambda x, y, s, rows=rows: permute(x, y, rows[s & 3]), 32, a, b, selector)
        machine.check(f"prmt.b32.{mode} %d, %a, %b, %c;", "u4", want, a, b, selector)
    for s in (0x3210, 0x7654, 0x0123, 0x5410, 0x4440, 0x9BA8):
        machine.check(
            f"prmt.b32 %d, %a, %b, {s:#x};", "u4",
            lanes(lambda x, y, s=s: permute(x, y, s), 32, a, b), a, b,
        )  # fmt: skip
        machine.check(
            f"mov.b32 %d, %a; prmt.b32 %d, %d, 0x4B00, {s:#x};", "u4",
            lanes(lambda x, s=s: permute(x, 0x4B00, s), 32, a), a,
        )  # fmt: skip


@pytest.mark.parametrize("kinds", ["u32.u32", "s32.s32", "u32.s32", "s32.u32"])
def test_byte_dot_products(machine: Any, rng: Any, kinds: str) -> None:
    a, b, c = (rng.integers(0, 1 << 32, N, dtype=np.uint64).astype("u4") for _ in range(3))
    types = ["i1" if kind[0] == "s" else "u1" for kind in kinds.split(".")]
    x, y = (v.view(t).astype(int).reshape(-1, 4) for v, t in zip((a, b), types, strict=True))
    want = ((x * y).sum(1) + c) % 2**32
    machine.check(f"dp4a.{kinds} %d, %a, %b, %c;", "u4", want, a, b, c)
    wide = a.view("i2" if kinds[0] == "s" else "u2").astype(int).reshape(-1, 2)
    for half, columns in (("lo", slice(0, 2)), ("hi", slice(2, 4))):
        want = ((wide * y[:, columns]).sum(1) + c) % 2**32
        machine.check(f"dp2a.{half}.{kinds} %d, %a, %b, %c;", "u4", want, a, b, c)


def test_carry_chain(machine: Any, rng: Any) -> None:
    """A 64-bit sum and difference in two 32-bit halves."""
    a, b = values(rng, 64, False), values(rng, 64, False)
    for name in ("add", "sub"):
        code = (
            ".reg .b32 %l0, %h0, %l1, %h1; mov.b64 {%l0, %h0}, %a; mov.b64 {%l1, %h1}, %b;"
            f"{name}.cc.u32 %l0, %l0, %l1; {name}c.u32 %h0, %h0, %h1; mov.b64 %d, {{%l0, %h0}};"
        )
        want = a + b if name == "add" else a - b
        assert (machine.evaluate(code, "u8", a, b) == want).all()


def test_saturating_add(machine: Any, rng: Any) -> None:
    a, b = values(rng, 32, True), values(rng, 32, True)
    want = np.clip(a.astype(int) + b, -(2**31), 2**31 - 1)
    machine.check("add.sat.s32 %d, %a, %b;", "i4", want, a, b)


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_setp(machine: Any, rng: Any, kind: str) -> None:
    bits = int(kind[1:])
    a, b = values(rng, bits, kind[0] == "s"), values(rng, bits, kind[0] == "s")
    a[::5] = b[::5]
    for name, function in COMPARE.items():
        code = f"setp.{name}.{kind} %p, %a, %b; selp.u32 %d, 7, 3, %p;"
        machine.check(code, "u4", np.where(function(a, b), 7, 3), a, b)
    if kind[0] == "u":
        for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            code = f"setp.{name}.{kind} %p, %a, %b; selp.u32 %d, 7, 3, %p;"
            machine.check(code, "u4", np.where(COMPARE[same](a, b), 7, 3), a, b)


def test_setp_combined_with_two_results(machine: Any, rng: Any) -> None:
    a, b = values(rng, 32, True), values(rng, 32, True)
    for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        for sign in ("", "!"):
            code = (
                f"setp.gt.s32 %use, %b, 0; setp.lt.{name}.s32 %p|%q, %a, %b, {sign}%use;"
                "selp.u32 %d, 1, 0, %p; selp.u32 %x, 2, 0, %q; or.b32 %d, %d, %x;"
            )
            use = (b > 0) ^ (sign == "!")
            want = function(a < b, use) * 1 + function(~(a < b), use) * 2
            for mode in ("whole", "scattered"):
                assert (machine.evaluate(code, "u4", a, b, mode=mode) == want).all()


def test_set_slct_and_predicate_logic(machine: Any, rng: Any) -> None:
    a, b, c = (values(rng, 32, True) for _ in range(3))
    machine.check("set.lt.u32.s32 %d, %a, %b;", "u4", np.where(a < b, 2**32 - 1, 0), a, b)
    machine.check("set.lt.f32.s32 %d, %a, %b;", "f4", (a < b) * 1.0, a, b)
    machine.check("slct.b32.s32 %d, %a, %b, %c;", "i4", np.where(c >= 0, a, b), a, b, c)
    code = (
        "setp.lt.s32 %p, %a, %b; setp.lt.s32 %q, %b, %c; and.pred %use, %p, %q;"
        "not.pred %q, %q; or.pred %use, %use, %q; selp.b32 %d, 1, 0, %use;"
    )
    want = ((a < b) & (b < c)) | ~(b < c)
    assert (machine.evaluate(code, "u4", a, b, c) == want).all()
