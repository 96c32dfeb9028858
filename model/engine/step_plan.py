"""The rows of a step, and what the tokens that it chose mean: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from urdir.model.engine.request import Ending


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start`` to ``end`` of a sequence, whose tokens are known. The logits after the
    last of them choose a token where it ``is_last``."""

    request: int
    sequence: int
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step.

    Decode row r processes the token at ``positions[r]`` of sequence ``decode[r]``, for request
    ``requests[r]``; the step before may be choosing it still. Segments of prompts follow.
    ``admitted`` are the requests whose sequences are new, with these.
    """

    requests: tuple[int, ...]
    decode: tuple[int, ...]
    positions: tuple[int, ...]
    segments: tuple[Segment, ...]
    admitted: tuple[tuple[int, int], ...]

    @property
    def choosers(self) -> tuple[int, ...]:
        """The requests that the step chooses a token for: decode rows, then segments."""
        return self.requests + tuple(s.request for s in self.segments if s.is_last)


class Outcome(NamedTuple):
    """A token that a step chose for a request: the ``row``-th of its choosers. ``ending`` is there
    where the answer ends by it; an end token is no part of the answer."""

    request: int
    row: int
    token: int
    ending: Ending | None
