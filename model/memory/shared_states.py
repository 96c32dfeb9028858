"""States of recurrent layers that requests share: kept on the way through a prompt, and copied to
whoever begins with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.driver.errors import DriverError
from urdir.model.memory.prefix_states import PrefixStates
from urdir.model.memory.recurrent_state import RecurrentState


class SharedStates:
    """The kept places of ``states``, for beginnings of whole pages of ``page_len`` tokens.

    Copies are queued where they are asked for, after the steps that are queued then. So a place can
    be taken for another state while one before it is still being read or written.
    """

    def __init__(self, states: RecurrentState, page_len: int) -> None:
        self._states = states
        self.known = PrefixStates(states.shape.kept if page_len else 0, page_len)
        sequences = states.shape.sequences
        # Of each sequence: where its states are to be kept; lengths and places of those that steps
        # under way give; how many of its tokens others may begin with.
        self._cuts: list[tuple[int, ...]] = [()] * sequences
        self._given: list[list[tuple[int, int]]] = [[] for _ in range(sequences)]
        self._shared = [0] * sequences

    def begin(self, sequence: int, tokens: Sequence[int], found: int, scope: bytes) -> None:
        """A sequence of ``scope`` begins that is to have ``tokens``, of which it has the first
        ``found``."""
        self._cuts[sequence] = self.known.cuts(tokens, found, scope)
        self._shared[sequence] = found

    def restore(self, sequence: int, place: int) -> None:
        """Make the state of a sequence that in a place. Raises DriverError."""
        self._states.restore(place, sequence)

    def next_cut(self, sequence: int, length: int) -> int | None:
        """The first length beyond ``length`` after which the state of a sequence is to be kept."""
        return next((cut for cut in self._cuts[sequence] if cut > length), None)

    def keep(self, sequence: int, length: int) -> None:
        """The state of a sequence is that after ``length`` tokens, once the steps that are queued
        have run: it is kept where it is to be. Raises DriverError."""
        if length not in self._cuts[sequence] or (place := self.known.take()) is None:
            return
        try:
            self._states.save(sequence, place)
        except DriverError:
            self.known.give_back(place)
            raise
        self._given[sequence].append((length, place))

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> int:
        """A sequence holds ``tokens``, computed; how many of them others of ``scope`` may begin
        with."""
        given = self._given[sequence]
        while given and given[0][0] <= len(tokens):
            length, place = given.pop(0)
            self.known.know(tokens[:length], place, scope)
            self._shared[sequence] = length
        return min(self._shared[sequence], len(tokens))

    def end(self, sequence: int) -> None:
        """A sequence ends: states of steps that are not complete count for nothing."""
        for _, place in self._given[sequence]:
            self.known.give_back(place)
        self._given[sequence].clear()
        self._cuts[sequence], self._shared[sequence] = (), 0
