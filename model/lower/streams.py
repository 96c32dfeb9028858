"""Rules for hyper-connections: a residual of several streams."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.graph.streams import JoinStreams, ReadStreams, WriteStreams
from urdir.model.lower.rule import Rule, launched
from urdir.ptxgen.kernels.streams import Streams


def _read(op: ReadStreams) -> Streams:
    return Streams("read", op.y.width, op.x.rows, op.of.iterations, op.of.eps)


def _write(op: WriteStreams) -> Streams:
    by = op.of
    return Streams("write", op.made.width, op.x.rows, by.iterations, by.eps, by.magnitude)


def _join(op: JoinStreams) -> Streams:
    """Their mean, or a weighted sum."""
    if op.of is None:
        return Streams("mean", op.y.width, op.x.rows)
    return Streams("join", op.y.width, op.x.rows, eps=op.of.eps)


RULES: Sequence[Rule] = (
    launched("widen", lambda op: Streams("widen", op.x.width, op.x.rows)),
    launched("read_streams", _read),
    launched("write_streams", _write),
    launched("add_to_streams", lambda op: Streams("add", op.made.width, op.x.rows)),
    launched("join_streams", _join),
)
