"""Shared states of recurrent layers: saved while prompts are computed, copied to sequences with the
same prefix."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.driver.errors import DriverError
from urdir.model.memory.prefix_states import PrefixStates
from urdir.model.memory.recurrent_state import RecurrentState


class SharedStates:
    """The slots of ``states`` for prefixes of whole pages of ``page_len`` tokens.

    Copies are queued immediately, after the queued steps. So a slot can be taken for another state
    while an earlier one is still being read or written.
    """

    def __init__(self, states: RecurrentState, page_len: int) -> None:
        self._states = states
        self.known = PrefixStates(states.shape.kept if page_len else 0, page_len)
        sequences = states.shape.sequences
        # Per sequence: lengths at which to save states; lengths and slots of the states that queued
        # steps will produce; how many of its tokens others may reuse.
        self._cuts: list[tuple[int, ...]] = [()] * sequences
        self._given: list[list[tuple[int, int]]] = [[] for _ in range(sequences)]
        self._shared = [0] * sequences

    def begin(self, sequence: int, tokens: Sequence[int], found: int, scope: bytes) -> None:
        """Start a sequence of ``scope`` that will have ``tokens``, of which it already has the
        first ``found``."""
        self._cuts[sequence] = self.known.cuts(tokens, found, scope)
        self._shared[sequence] = found

    def restore(self, sequence: int, place: int) -> None:
        """Copy the state in a slot to a sequence. Raises DriverError."""
        self._states.restore(place, sequence)

    def next_cut(self, sequence: int, length: int) -> int | None:
        """The first length beyond ``length`` at which the state of a sequence should be saved."""
        return next((cut for cut in self._cuts[sequence] if cut > length), None)

    def keep(self, sequence: int, length: int) -> None:
        """Save the state of a sequence after ``length`` tokens, once the queued steps have run, if
        that length was selected. Raises DriverError."""
        if length not in self._cuts[sequence] or (place := self.known.take()) is None:
            return
        try:
            self._states.save(sequence, place)
        except DriverError:
            self.known.give_back(place)
            raise
        self._given[sequence].append((length, place))

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> int:
        """Record that a sequence has computed ``tokens``; returns how many of them others of
        ``scope`` may reuse."""
        given = self._given[sequence]
        while given and given[0][0] <= len(tokens):
            length, place = given.pop(0)
            self.known.know(tokens[:length], place, scope)
            self._shared[sequence] = length
        return min(self._shared[sequence], len(tokens))

    def end(self, sequence: int) -> None:
        """End a sequence: states of incomplete steps are dropped."""
        for _, place in self._given[sequence]:
            self.known.give_back(place)
        self._given[sequence].clear()
        self._cuts[sequence], self._shared[sequence] = (), 0
