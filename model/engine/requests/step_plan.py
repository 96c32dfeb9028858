"""The rows of a step, and what the tokens that it chose mean: plain data."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from urdir.model.engine.batch import Batch, Segment
from urdir.model.engine.requests.request import Ending


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step: a ``batch``, and the requests that its rows are of. The results of its
    scored rows lie where its ``turn`` says (`ScoredRows`).

    Decode row r processes the token at ``positions[r]`` for request ``requests[r]``; the step
    before may be choosing it still. Where there are drafts, that is the last place at which it may
    be. Segment i is of request ``prompts[i]``. ``admitted`` are the
    requests whose sequences are new, with these. Before the step a draft model passes the tokens
    ``missed`` of requests, which steps without drafts did not pass through it.
    """

    batch: Batch
    requests: tuple[int, ...]
    positions: tuple[int, ...]
    prompts: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    missed: tuple[tuple[int, Segment], ...] = ()
    turn: int = 0

    def after(self, steps: int) -> StepPlan:
        """The step of the same rows, none of them a prompt's, this many steps later."""
        pairs = zip(self.positions, self.batch.draft_counts, strict=True)
        positions = tuple([at + steps * (1 + count) for at, count in pairs])
        return StepPlan(self.batch, self.requests, positions, self.prompts, self.admitted)

    def of(self, requests: Container[int]) -> StepPlan:
        """The rows of these requests alone."""
        if all(number in requests for number in self.members):
            return self
        rows = [row for row, number in enumerate(self.requests) if number in requests]
        parts = [part for part, number in enumerate(self.prompts) if number in requests]
        decode, segments, drafts = self.batch.decode, self.batch.segments, self.batch.drafts
        return StepPlan(
            Batch(
                tuple(decode[row] for row in rows),
                tuple(segments[part] for part in parts),
                tuple(drafts[row] for row in rows) if drafts else (),
            ),
            tuple(self.requests[row] for row in rows),
            tuple(self.positions[row] for row in rows),
            tuple(self.prompts[part] for part in parts),
            tuple(each for each in self.admitted if each[0] in requests),
            tuple(each for each in self.missed if each[0] in requests),
            self.turn,
        )

    @property
    def members(self) -> tuple[int, ...]:
        """The requests that have rows."""
        return self.requests + self.prompts

    @property
    def choosers(self) -> tuple[int, ...]:
        """The requests that the step chooses a token for, in the order of `Batch.choosing`."""
        if not self.prompts:
            return self.requests
        segments = zip(self.prompts, self.batch.segments, strict=True)
        return self.requests + tuple(number for number, s in segments if s.chooses)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Sequence and position of the rows that choose a token."""
        decode = zip(self.batch.decode, self.positions, strict=True)
        return [*decode, *((s.sequence, s.end - 1) for s in self.batch.segments if s.chooses)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the step, at most."""
        ends = [segment.end for segment in self.batch.segments]
        pairs = zip(self.positions, self.batch.draft_counts, strict=True)
        return max([*ends, *(position + 1 + count for position, count in pairs)])


class Chosen(NamedTuple):
    """The tokens that a step chose for a request, one after the other: one, and one for each of the
    ``drafts`` accepted."""

    tokens: tuple[int, ...]
    drafts: int = 0


class Outcome(NamedTuple):
    """A token that a step chose for a request, the ``row``-th of its choosers, after the one at
    ``position``; None for an answer that has no tokens. ``ending`` is given if the answer ends; an
    end token does not belong to it."""

    request: int
    row: int
    position: int
    token: int | None
    ending: Ending | None
