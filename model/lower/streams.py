"""Rules for hyper-connections: a residual of several streams."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.graph.op import Op
from urdir.model.graph.streams import (
    AddToStreams,
    JoinStreams,
    ReadStreams,
    Widen,
    WriteStreams,
)
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule
from urdir.ptxgen.kernels.streams import Streams


def lower_widen(at: Lowering, ops: Sequence[Op]) -> bool:
    """The first streams."""
    (of,) = ops
    assert isinstance(of, Widen)
    kernel = Streams("widen", of.x.width, of.x.rows)
    at.launch(kernel, of.label, x=at.place(of.x), y=at.place(of.y))
    return True


def lower_join(at: Lowering, ops: Sequence[Op]) -> bool:
    """Their mean, or a weighted sum."""
    (of,) = ops
    assert isinstance(of, JoinStreams)
    x, y = at.place(of.x), at.place(of.y)
    if of.of is None or of.mixes is None:
        at.launch(Streams("mean", of.y.width, of.x.rows), of.label, x=x, y=y)
        return True
    kernel = Streams("join", of.y.width, of.x.rows, eps=of.of.eps)
    weights = {"scale": at.vector(of.of.scale), "base": at.vector(of.of.base)}
    at.launch(kernel, of.label, x=x, mixes=at.place(of.mixes), y=y, **weights)
    return True


def lower_read(at: Lowering, ops: Sequence[Op]) -> bool:
    """What a block reads."""
    (of,) = ops
    assert isinstance(of, ReadStreams)
    kernel = Streams("read", of.y.width, of.x.rows, of.of.iterations, of.of.eps)
    weights = {"scale": at.vector(of.of.scale), "base": at.vector(of.of.base)}
    x, mixes = at.place(of.x), at.place(of.mixes)
    at.launch(kernel, of.label, x=x, mixes=mixes, y=at.place(of.y), **weights)
    return True


def lower_write(at: Lowering, ops: Sequence[Op]) -> bool:
    """What a block leaves."""
    (of,) = ops
    assert isinstance(of, WriteStreams)
    by = of.of
    kernel = Streams("write", of.made.width, of.x.rows, by.iterations, by.eps, by.magnitude)
    weights = {"scale": at.vector(of.of.scale), "base": at.vector(of.of.base)}
    x, made, mixes = (at.place(tensor) for tensor in (of.x, of.made, of.mixes))
    at.launch(kernel, of.label, x=x, made=made, mixes=mixes, y=at.place(of.y), **weights)
    return True


def lower_add(at: Lowering, ops: Sequence[Op]) -> bool:
    """What a block adds."""
    (of,) = ops
    assert isinstance(of, AddToStreams)
    kernel = Streams("add", of.made.width, of.x.rows)
    x, made, mixes = (at.place(tensor) for tensor in (of.x, of.made, of.mixes))
    at.launch(kernel, of.label, x=x, made=made, mixes=mixes, y=at.place(of.y))
    return True


RULES: Sequence[Rule] = (
    Rule("widen", lower_widen),
    Rule("read_streams", lower_read),
    Rule("write_streams", lower_write),
    Rule("add_to_streams", lower_add),
    Rule("join_streams", lower_join),
)
