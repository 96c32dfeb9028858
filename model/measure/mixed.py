"""Steps with rows of prompts beside answers, compared with steps of each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from urdir.model.engine.batch import Batch, Grain, Output, Segment
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.session import Session
from urdir.model.measure.timed_answers import drawn_tokens, time_beside, time_decoding, usual_spread
from urdir.ptxgen.spec import ceil_div

#: Steps of one measurement, runs of each, the best of which counts.
_STEPS, _RUNS = 16, 3
#: Sequences for prompts: one that begins while the ends of those before are still to be read.
SPARE = 6


@dataclass(frozen=True, slots=True)
class MixedRow:
    """ms of a step of ``sequences`` answers with ``rows`` of a prompt (``mixed_ms``), and of the
    same answers and the same prompt alone. ``excess``: how much longer it takes than both, as a
    part of their sum."""

    sequences: int
    rows: int
    decode_ms: float
    prompt_ms: float
    mixed_ms: float
    excess: float


def session_size(cases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Sequences of a session for such cases, and their context."""
    most, rows = max(n for n, _ in cases), max(rows for _, rows in cases)
    return most + SPARE, max(rows, most // 4) + 8 * _STEPS


def mixed_rows(session: Session, cases: Sequence[tuple[int, int]]) -> Iterator[MixedRow]:
    """Time (sequences, rows of a prompt) on a session with `SPARE` more sequences."""
    for sequences, rows in cases:
        prompts = [[token] for token in drawn_tokens(session, sequences)]
        spread = usual_spread(sequences)
        decode = min(
            time_decoding(session, prompts, _STEPS, spread).seconds / _STEPS for _ in range(_RUNS)
        )
        _record(session, sequences, rows)
        alone, beside = (_beside(session, of, rows) for of in ([], prompts))
        excess = beside / (decode + alone) - 1
        yield MixedRow(sequences, rows, 1e3 * decode, 1e3 * alone, 1e3 * beside, excess)


def _beside(session: Session, prompts: Sequence[Sequence[int]], rows: int) -> float:
    """Seconds of a step with a prompt of this many rows beside answers to ``prompts``."""
    usual = Limits.for_throughput(session.shapes, session.sequences)
    most = usual.alignment * ceil_div(rows, usual.alignment)
    limits = replace(usual, prompt_rows=most, mixed_rows=most, share_prefixes=False)
    asked = [drawn_tokens(session, rows)] * _STEPS
    return min(time_beside(session, prompts, asked, limits).seconds / _STEPS for _ in range(_RUNS))


def _record(session: Session, sequences: int, rows: int) -> None:
    """Record the steps of a prompt of this many rows beside this many answers, with little padding:
    a service does so where such steps come often."""
    batch = Batch(tuple(range(sequences)), (Segment(sequences, 0, rows, chooses=True),))
    for length in session.shapes.lengths:
        shape = session.shapes.of_batch(batch, length, Output.GREEDY, Grain.FINE)
        session.steps.make_ready(shape)
