"""What sequences have on the device: keys and values, the states of recurrent layers, and what is
left of tokens that nobody uses any more.

A place for a sequence is handed on from one answer to the next. What a contiguous cache holds of
the last one stays where it is when the place is released, so that the next turn of a conversation
goes on from there. In pages any sequence finds what any other has left (`KvCache.match`).
"""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.pages import common_length
from urdir.model.memory.recurrent_state import RecurrentState


class SequenceStorage:
    """Room for the tokens of sequences, numbered from 0, in ``cache`` and ``states``.

    A sequence that is in use grows by `reserve` and is cut by `truncate`. Where requests take
    turns, `match` begins one and `release` ends it.
    """

    def __init__(self, cache: KvCache, states: RecurrentState) -> None:
        self._cache = cache
        self._states = states
        places = cache.shape.sequences
        # Of released places: the tokens that are there, and of how many the last state may be.
        self._left: list[tuple[int, ...]] = [()] * places
        self._reached = [0] * places

    @property
    def most_tokens(self) -> int:
        """The longest that a sequence can become that has the storage for itself."""
        return self._cache.most_tokens

    @property
    def share_len(self) -> int:
        """Tokens of the pages that sequences share; 0 where they share none."""
        return self._cache.share_len

    # ---- requests take turns ----

    def match(self, sequence: int, tokens: Sequence[int], end: int, spare: int = 0) -> int:
        """Begin a sequence that was released with what is known of ``tokens``, and room for
        ``end``; how many it has then. Raises ContextFullError unless room for ``spare`` tokens of
        others is left, and DriverError: nothing is begun then."""
        left, reached = self._left[sequence], self._reached[sequence]
        found = self.kept(sequence, common_length(left, tuple(tokens)), reached) if left else 0
        self._left[sequence] = ()
        self.truncate(sequence, found, reached)
        if not found:
            return self._cache.match(sequence, tokens, end, spare)
        self._cache.reserve(sequence, found, end)
        return found

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence holds ``tokens`` from its first position on: others may begin with them."""
        self._cache.publish(sequence, tokens)

    def release(self, sequence: int, tokens: Sequence[int], reached: int) -> None:
        """A sequence is not used any more: ``tokens`` are what it holds from its first position on,
        and steps were queued for up to ``reached`` positions."""
        self._cache.publish(sequence, tokens)
        if self._cache.pools or not tokens:
            self.truncate(sequence, 0, reached)
        else:
            self._left[sequence], self._reached[sequence] = tuple(tokens), reached

    # ---- a sequence that is in use ----

    def reserve(self, sequence: int, start: int, end: int) -> int:
        """Make positions ``start`` to ``end`` writable; see `KvCache.reserve`."""
        self._forget(sequence)
        return self._cache.reserve(sequence, start, end)

    def kept(self, sequence: int, length: int, now: int) -> int:
        """How many of the first ``length`` tokens of ``now`` a sequence can be cut to: all of them;
        none where layers with a window no longer hold what the next token looks back on; with
        recurrent layers, as many as there is a state of."""
        return self._cache.kept(sequence, self._states.kept(sequence, length, now))

    def truncate(self, sequence: int, length: int, now: int) -> None:
        """Forget what a sequence of ``now`` tokens has from ``length`` on. Raises ModelError,
        nothing changed, where the first ``length`` tokens are not `kept`."""
        self._forget(sequence)
        if self._cache.kept(sequence, length) == length:
            self._states.truncate(sequence, length, now)
        self._cache.truncate(sequence, length)

    def keep_state(self, sequence: int, length: int) -> None:
        """A prompt ends here, after ``length`` tokens: its state is kept, to be cut to."""
        self._states.keep(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Make ``target`` hold the first ``length`` tokens of ``source``, all that it has."""
        self._forget(target)
        self._cache.fork(source, target, length)
        self._states.fork(source, target, length)

    def _forget(self, sequence: int) -> None:
        """A released place is taken without `match`: what is left there counts for nothing."""
        if self._left[sequence]:
            self._left[sequence] = ()
            self.truncate(sequence, 0, self._reached[sequence])
