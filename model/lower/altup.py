"""Rules for several streams, and for sparse gates (Gemma 3n)."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.graph.altup import CorrectStreams, MatchLength, PredictStreams, Sparsify
from urdir.model.graph.op import Op
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule
from urdir.ptxgen.kernels.altup import correct_streams, match_length, predict_streams, sparsify


def lower_predict(at: Lowering, ops: Sequence[Op]) -> bool:
    """Predict all streams."""
    (of,) = ops
    assert isinstance(of, PredictStreams)
    kernel = predict_streams.PredictStreams(of.y.rows, of.y.width, len(of.x))
    streams = {f"x{i}": at.place(x) for i, x in enumerate(of.x)}
    results = {f"y{i}": at.place(y) for i, y in enumerate(of.results)}
    at.launch(kernel, of.label, coefs=at.place(of.coefs), **streams, **results)
    return True


def lower_correct(at: Lowering, ops: Sequence[Op]) -> bool:
    """Correct all streams, and scale the first one."""
    (of,) = ops
    assert isinstance(of, CorrectStreams)
    kernel = correct_streams.CorrectStreams(of.y.rows, of.y.width, len(of.x))
    streams = {f"x{i}": at.place(x) for i, x in enumerate(of.x)}
    results = {f"y{i}": at.place(y) for i, y in enumerate(of.results)}
    others = {"made": at.place(of.made), "coefs": at.place(of.coefs), "z": at.place(of.z)}
    at.launch(kernel, of.label, scale=at.vector(of.scale), **others, **streams, **results)
    return True


def lower_match_length(at: Lowering, ops: Sequence[Op]) -> bool:
    """Scale rows to the length of other rows."""
    (of,) = ops
    assert isinstance(of, MatchLength)
    kernel = match_length.MatchLength(of.y.rows, of.y.width)
    x, target = at.place(of.x), at.place(of.target)
    at.launch(kernel, of.label, x=x, target=target, y=at.place(of.y))
    return True


def lower_sparsify(at: Lowering, ops: Sequence[Op]) -> bool:
    """Keep gates far above their mean."""
    (of,) = ops
    assert isinstance(of, Sparsify)
    kernel = sparsify.Sparsify(of.y.rows, of.y.width, of.deviations)
    at.launch(kernel, of.label, x=at.place(of.x), y=at.place(of.y))
    return True


RULES: Sequence[Rule] = (
    Rule("predict_streams", lower_predict),
    Rule("correct_streams", lower_correct),
    Rule("match_length", lower_match_length),
    Rule("sparsify", lower_sparsify),
)
