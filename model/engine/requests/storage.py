"""What a scheduler needs of the memory of sequences; no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Storage(Protocol):
    """Room for the tokens of sequences, numbered from 0: `SequenceStorage`, which says more."""

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sequence that has the storage for itself."""

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        """Begin a sequence with what is known of ``tokens`` in ``scope``, with room for ``end``;
        how many it has then. Raises ContextFullError unless room for ``spare`` others stays."""

    def cut(self, sequence: int, start: int, end: int) -> int:
        """Where a segment ends that begins at ``start``, at ``end`` at most."""

    def next_shared(self, sequence: int, length: int) -> int:
        """The first length beyond ``length`` of a sequence that others of its scope will find; 0
        for none."""

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None:
        """A sequence holds ``tokens``, computed, for others of ``scope`` to begin with."""

    def reserve(self, sequence: int, start: int, end: int) -> int:
        """Make room for positions ``start`` to ``end``, at least; up to where there is room then.
        Raises ContextFullError."""

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None:
        """A sequence ends that holds ``tokens``, computed, for others of ``scope`` to begin with;
        steps were queued for up to ``reached`` positions."""
