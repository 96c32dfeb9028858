"""Shuffles, votes, reductions, matches: against the pseudo code of the PTX ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

N = 192
FULL = "0xFFFFFFFF"


def words(rng: Any, high: int = 1 << 32) -> Any:
    return rng.integers(0, high, N, dtype=np.uint64).astype("u4")


def shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    segment, clamp = c >> 8 & 31, c & 31
    most = (lane & segment) | (clamp & ~segment)
    least = lane & segment
    j = {
        "up": lane - (b & 31), "down": lane + (b & 31), "bfly": lane ^ (b & 31),
        "idx": least | (b & 31 & ~segment),
    }[mode]  # fmt: skip
    valid = j >= most if mode == "up" else j <= most
    return (j if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [32, 16, 8])
def test_shfl(machine: Any, rng: Any, mode: str, segment: int) -> None:
    a = words(rng)
    clamp = (32 - segment) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 5, 16, 31):
        pairs = [shuffle(mode, i % 32, by, clamp) for i in range(N)]
        want = np.array([a[i // 32 * 32 + j] for i, (j, _) in enumerate(pairs)])
        valid = np.array([v for _, v in pairs])
        code = f"shfl.sync.{mode}.b32 %d|%p, %a, {by}, {clamp}, {FULL};"
        assert (machine.evaluate(code, "u4", a) == want).all()
        code = f"shfl.sync.{mode}.b32 %x|%p, %a, {by}, {clamp}, {FULL}; selp.b32 %d, 1, 0, %p;"
        if by == 5:
            assert (machine.evaluate(code, "u4", a) == valid).all()


def test_shfl_by_register(machine: Any, rng: Any) -> None:
    a, b = words(rng), words(rng, 64)
    want = np.array([a[i // 32 * 32 + shuffle("idx", i % 32, int(b[i]), 31)[0]] for i in range(N)])
    code = f"shfl.sync.idx.b32 %d, %a, %b, 31, {FULL};"
    assert (machine.evaluate(code, "u4", a, b) == want).all()


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_with_one_operand_in_a_register(machine: Any, rng: Any, mode: str) -> None:
    """Wherever a value is the same in all lanes, it may be a register as well as a number."""
    values = rng.integers(0, 2**32, 64, dtype=np.uint32)
    same = np.full(64, 5, np.uint32)
    clamp = 0 if mode == "up" else 31
    code = f"shfl.sync.{mode}.b32 %d, %a, 5, {clamp}, {FULL};"
    expected = machine.evaluate(code, "uint32", values, same)
    by = code.replace(" 5,", " %b,")
    assert np.array_equal(machine.evaluate(by, "uint32", values, same), expected)
    within = code.replace(f" {clamp},", " %b,")
    clamps = np.full(64, clamp, np.uint32)
    assert np.array_equal(machine.evaluate(within, "uint32", values, clamps), expected)


def test_shfl_in_half_warps(machine: Any, rng: Any) -> None:
    """Odd lanes exchange among themselves under their own member mask."""
    a = words(rng)
    code = (
        "and.b32 %x, %i, 1; setp.eq.u32 %p, %x, 0; mov.b32 %d, 0; @%p bra EVEN;"
        "shfl.sync.bfly.b32 %d, %a, 6, 31, 0xAAAAAAAA; EVEN:"
    )
    lanes = np.arange(N)
    want = np.where(lanes % 2, a[lanes ^ 6], 0)
    assert (machine.evaluate(code, "u4", a) == want).all()


def test_shuffle_waits_for_the_rest_of_the_warp(machine: Any, rng: Any) -> None:
    """The lanes that skip ahead to the shuffle meet those that are still behind it in the text."""
    a = words(rng)
    code = (
        "mov.b32 %d, %a; and.b32 %x, %i, 4; setp.ne.u32 %p, %x, 0; @%p bra LATE;"
        f"JOIN: shfl.sync.bfly.b32 %d, %d, 5, 31, {FULL}; bra.uni END;"
        "LATE: add.u32 %d, %d, 1; bra.uni JOIN; END:"
    )
    lanes = np.arange(N)
    value = a + (lanes & 4 != 0)
    assert (machine.evaluate(code, "u4", a) == value[lanes ^ 5].astype("u4")).all()


def ballots(flags: Any, members: int = 0xFFFFFFFF) -> Any:
    bits = (flags.reshape(-1, 32) * (1 << np.arange(32, dtype=np.uint64))).sum(1)
    return np.repeat(bits.astype("u4") & np.uint32(members), 32)


def test_votes(machine: Any, rng: Any) -> None:
    a = words(rng, 4)
    a[:32] = 1
    a[32:64] = 0
    flags = a > 0
    code = "setp.gt.u32 %p, %a, 0;"
    whole = ballots(flags)
    for mode, want in (
        ("all", whole == 0xFFFFFFFF), ("any", whole != 0),
        ("uni", (whole == 0) | (whole == 0xFFFFFFFF)),
    ):  # fmt: skip
        text = code + f"vote.sync.{mode}.pred %q, %p, {FULL}; selp.b32 %d, 1, 0, %q;"
        assert (machine.evaluate(text, "u4", a) == want).all()
    text = code + f"vote.sync.ballot.b32 %d, %p, {FULL};"
    assert (machine.evaluate(text, "u4", a) == whole).all()
    text = code + f"vote.sync.ballot.b32 %d, !%p, {FULL};"
    assert (machine.evaluate(text, "u4", a) == ~whole).all()
    text = (
        code + "and.b32 %x, %i, 1; setp.eq.u32 %q, %x, 0; mov.b32 %d, 0; @%q bra SKIP;"
        "vote.sync.ballot.b32 %d, %p, 0xAAAAAAAA; activemask.b32 %x; and.b32 %d, %d, %x; SKIP:"
    )
    odd = np.arange(N) % 2 == 1
    assert (machine.evaluate(text, "u4", a) == np.where(odd, ballots(flags, 0xAAAAAAAA), 0)).all()


@pytest.mark.parametrize(
    ("name", "function"),
    [("add.u32", np.add), ("min.u32", np.minimum), ("max.s32", np.maximum),
     ("and.b32", np.bitwise_and), ("or.b32", np.bitwise_or), ("xor.b32", np.bitwise_xor)],
)  # fmt: skip
def test_redux(machine: Any, rng: Any, name: str, function: Any) -> None:
    a = words(rng)
    typed = a.view("i4") if name.endswith("s32") else a
    want = np.repeat(function.reduce(typed.reshape(-1, 32), axis=1, dtype=typed.dtype), 32)
    got = machine.evaluate(f"redux.sync.{name} %d, %a, {FULL};", "u4", a)
    assert (got == want.view("u4")).all()
    want = np.repeat(function.reduce(typed.reshape(-1, 32)[:, 4:8], axis=1, dtype=typed.dtype), 32)
    code = (
        "and.b32 %x, %i, 28; setp.ne.u32 %p, %x, 4; mov.b32 %d, 0; @%p bra SKIP;"
        f"redux.sync.{name} %d, %a, 0xF0; SKIP:"
    )
    lanes = np.arange(N) % 32
    here = (lanes >= 4) & (lanes < 8)
    assert (machine.evaluate(code, "u4", a) == np.where(here, want.view("u4"), 0)).all()


def test_match(machine: Any, rng: Any) -> None:
    a = words(rng, 5)
    a[64:96] = 3
    rows = a.reshape(-1, 32)
    want = [
        sum(1 << j for j in range(32) if rows[w, j] == rows[w, i])
        for w in range(6)
        for i in range(32)
    ]
    got = machine.evaluate(f"match.any.sync.b32 %d, %a, {FULL};", "u4", a)
    assert got.tolist() == want
    code = f"match.all.sync.b32 %x|%p, %a, {FULL}; selp.b32 %d, %x, 0, %p;"
    same = np.repeat((rows == rows[:, :1]).all(1), 32)
    assert (machine.evaluate(code, "u4", a) == np.where(same, 0xFFFFFFFF, 0)).all()
    assert same.any()


def test_elect_and_lane_registers(machine: Any) -> None:
    a = np.zeros(N, "u4")
    lanes = np.arange(N) % 32
    code = f"elect.sync %x|%p, {FULL}; selp.b32 %d, 100, 0, %p; add.u32 %d, %d, %x;"
    assert (machine.evaluate(code, "u4", a) == np.where(lanes == 0, 100, 0)).all()
    code = "mov.u32 %d, %laneid; mov.u32 %x, %lanemask_lt; popc.b32 %x, %x; sub.u32 %d, %d, %x;"
    assert (machine.evaluate(code, "u4", a) == 0).all()
    got = machine.evaluate("mov.u32 %d, %lanemask_ge;", "u4", a)
    assert (got == (0xFFFFFFFF << lanes) & 0xFFFFFFFF).all()


def test_block_reduction_with_partial_warps(machine: Any, rng: Any) -> None:
    """48 threads: the second warp is half there; its shuffles stay among the living."""
    a = rng.integers(0, 1000, 48).astype("u4")
    code = "mov.b32 %d, %a;" + "".join(
        f"shfl.sync.bfly.b32 %x, %d, {k}, 31, {FULL}; add.u32 %d, %d, %x;" for k in (8, 4, 2, 1)
    )
    got = machine.evaluate(code, "u4", a)
    assert (got == np.repeat(a.reshape(3, 16).sum(1), 16)).all()
