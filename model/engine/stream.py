"""Decode steps of a stream: queued ahead of the reader, several at once, undone at the end."""

from __future__ import annotations

from collections import abc
from collections.abc import Generator
from contextlib import suppress
from typing import Protocol

from urdir.model.blocks.parts import StepParts
from urdir.model.engine.batch import Output
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.run_ahead import AT_ONCE, RunAhead
from urdir.model.engine.runner import Steps
from urdir.model.engine.sequence import Sequence
from urdir.model.engine.sequence_steps import SequenceSteps
from urdir.model.errors import ContextFullError


class Decoder(Protocol):
    """What a stream needs of a session: its sequences, and how steps of them are queued."""

    context: int
    sequences: tuple[Sequence, ...]
    parts: StepParts
    steps: Steps
    graphs: DecodeGraphs
    stepper: SequenceSteps
    waited_seconds: float

    def run_ahead(self) -> RunAhead[range]:
        """See Session."""

    def read(self, sequence: int, token: int) -> None:
        """See Session."""

    def undo_unread(self, sequence: int) -> None:
        """See Session."""


class DecodeStream:
    """The steps of some sequences together until one is full or has ended, or after ``most``
    steps."""

    def __init__(
        self, session: Decoder, output: Output, slots: abc.Sequence[int], most: int | None
    ) -> None:
        self._session = session
        self._output = output
        self._slots = slots
        self._most = most
        self._waits = False  # for the first token: the graph of the later ones is not recorded yet

    def tokens(self) -> Generator[list[int], None, None]:
        """The next token of each sequence, step after step. When it is closed, steps that ran
        beyond the last tokens it gave are undone.
        """
        session, slots = self._session, self._slots
        longest = session.stepper.longest(slots)
        room = session.context if self._most is None else longest + self._most
        end = min(session.context, room)
        sequences = [session.sequences[s] for s in slots]
        for sequence in sequences:
            sequence.check_read()
        ahead: RunAhead[range] = session.run_ahead()
        try:
            most = 1  # the first token comes early
            while True:
                while not ahead.is_full and (count := self._queue(most, end)):
                    ahead.queued(range(count))
                    most = AT_ONCE
                if not ahead:
                    return
                for _ in ahead.wait(lambda: self._look_ahead(end)):
                    yield [self._read(sequence) for sequence in sequences]
                    if any(sequence.has_ended for sequence in sequences):
                        return
        finally:
            session.waited_seconds += ahead.waited_seconds
            for slot in slots:
                session.undo_unread(slot)
            ahead.close()

    def _read(self, sequence: Sequence) -> int:
        """The next token of a sequence, whose step is complete."""
        token = self._session.parts.state.chosen(sequence.slot, len(sequence.tokens) - 1)
        self._session.read(sequence.slot, token)
        return token

    def _queue(self, steps: int, end: int) -> int:
        """Queue up to ``steps`` steps, none beyond a length of ``end``; returns how many, 0 where
        none can be queued yet.

        It is one where all of them have no graph (yet), are not of one length bucket, or have no
        room in the cache.
        """
        session, slots = self._session, self._slots
        longest = session.stepper.longest(slots)
        if longest >= end:
            return 0
        shape = session.stepper.shape_after(self._output, slots)
        if shape.prompt:
            session.stepper.launch(shape, slots)
            self._waits = True
            return 1
        if self._waits and not session.steps.is_recorded(shape):
            self._waits = False
            return 0  # the first token first; the graph is recorded while it is waited for
        several = session.graphs.several(shape, longest + 1)
        if several is not None and several.steps == steps <= end - longest:
            with suppress(ContextFullError):  # nothing has happened then
                session.stepper.launch(several, slots)
                return steps
        session.stepper.launch(shape, slots)
        return 1

    def _look_ahead(self, end: int) -> bool:
        """Do a small piece of preparing for the steps that will come; False where all is done, or
        where another thread does some of it."""
        length = self._session.stepper.longest(self._slots)
        prepare = self._session.graphs.prepare
        goes_on = prepare(len(self._slots), self._output, length, end, AT_ONCE)
        return goes_on and not self._session.steps.is_waiting
