"""Warp-wide instructions: shfl, vote, match, redux, elect (PTX ISA 9.7.9.6, 9.7.13)."""

from __future__ import annotations

import re

from urdir.driver.emulator.machine.emitter import NUMPY, Emitter
from urdir.driver.emulator.machine.operations import operation
from urdir.ptxgen.ptx import Discard, Operand, Pair


def lane_operand(e: Emitter, operand: Operand) -> str:
    """An integer literal for a constant, else the array."""
    value = e.immediate(operand)
    return str(value & 0xFFFFFFFF) if value is not None else e.full(operand, "u4")


def two_targets(operand: Operand) -> tuple[Operand, Operand]:
    """``d|p`` as d and p; of a lone ``d`` p is discarded."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, Discard()


@operation(r"shfl\.sync\.(up|down|bfly|idx)\.b32", "=b32|pred? b32 b32 b32 i32", converges=True)
def _shfl(e: Emitter, m: re.Match[str]) -> None:
    pair, a, b, c, _ = e.operands
    target, valid = two_targets(pair)
    by, clamp = lane_operand(e, b), lane_operand(e, c)
    source = e.full(a, "u4")
    if not isinstance(valid, Discard):
        result = e.target(valid, "b1")
        e.line(f"{result}[...] = W.shfl_valid({m[1]!r}, {by}, {clamp}, n)")
    e.line(f"{e.target(target, 'u4')}[...] = W.shfl({m[1]!r}, {source}, {by}, {clamp})")


@operation(r"vote\.sync\.(all|any|uni)\.pred", "=pred pred i32", converges=True)
def _vote(e: Emitter, m: re.Match[str]) -> None:
    d, a, mask = e.operands
    predicate, members = e.full(a, "b1"), lane_operand(e, mask)
    e.line(f"{e.target(d, 'b1')}[...] = W.vote({m[1]!r}, {predicate}, {members})")


@operation(r"vote\.sync\.ballot\.b32", "=b32 pred i32", converges=True)
def _ballot(e: Emitter, m: re.Match[str]) -> None:
    d, a, mask = e.operands
    predicate, members = e.full(a, "b1"), lane_operand(e, mask)
    e.line(f"{e.target(d, 'u4')}[...] = W.ballot({predicate}, {members})")


@operation(r"activemask\.b32", "=b32", 30, (6, 2))
def _activemask(e: Emitter, m: re.Match[str]) -> None:
    e.line(f"{e.target(e.operands[0], 'u4')}[...] = W.active(n)")


@operation(r"match\.(any)\.sync\.(b32|b64)", "=i32 {2} i32", converges=True)
@operation(r"match\.(all)\.sync\.(b32|b64)", "=i32?|pred? {2} i32", converges=True)
def _match(e: Emitter, m: re.Match[str]) -> None:
    pair, a, mask = e.operands
    target, same = two_targets(pair)
    element = NUMPY[m[2]]
    e.line(f"v, w = W.match({m[1]!r}, {e.full(a, element)}, {lane_operand(e, mask)})")
    e.line(f"{e.target(target, 'u4')}[...] = v")
    if not isinstance(same, Discard):
        e.line(f"{e.target(same, 'b1')}[...] = w")


@operation(r"redux\.sync\.(add|min|max)\.(u32|s32)", "=i32 i32 i32", 80, (7, 0), converges=True)
@operation(r"redux\.sync\.(and|or|xor)\.(b32)", "=i32 i32 i32", 80, (7, 0), converges=True)
def _redux(e: Emitter, m: re.Match[str]) -> None:
    d, a, mask = e.operands
    element = NUMPY[m[2]]
    source, members = e.full(a, element), lane_operand(e, mask)
    e.line(f"{e.target(d, element)}[...] = W.redux({m[1]!r}, {source}, {members})")


@operation(r"elect\.sync", "=i32?|pred i32", 90, (8, 0), converges=True)
def _elect(e: Emitter, m: re.Match[str]) -> None:
    target, mask = e.operands
    assert isinstance(target, Pair)
    e.line(f"v, w = W.elect({lane_operand(e, mask)}, n)")
    if not isinstance(target.first, Discard):
        e.line(f"{e.target(target.first, 'u4')}[...] = v")
    e.line(f"{e.target(target.second, 'b1')}[...] = w")


@operation(r"bar\.warp\.sync", "i32", converges=True)
def _bar_warp(e: Emitter, m: re.Match[str]) -> None:
    """Lanes have already converged here."""
    e.watch("converge", "L")
