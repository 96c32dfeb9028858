"""Rules for several streams, and for sparse gates (Gemma 3n)."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.lower.rule import Rule, launched
from urdir.ptxgen.kernels.altup.correct_streams import CorrectStreams
from urdir.ptxgen.kernels.altup.match_length import MatchLength
from urdir.ptxgen.kernels.altup.predict_streams import PredictStreams
from urdir.ptxgen.kernels.altup.sparsify import Sparsify

RULES: Sequence[Rule] = (
    launched("predict_streams", lambda of: PredictStreams(of.y.rows, of.y.width, len(of.x))),
    launched("correct_streams", lambda of: CorrectStreams(of.y.rows, of.y.width, len(of.x))),
    launched("match_length", lambda of: MatchLength(of.y.rows, of.y.width)),
    launched("sparsify", lambda of: Sparsify(of.y.rows, of.y.width, of.deviations)),
)
