"""What sequences have on the device: keys and values, the states of recurrent layers, and what is
left of tokens that nobody uses any more.

A place for a sequence is handed on from one answer to the next. What a contiguous cache holds of
the last one stays where it is when the place is released, so that the next turn of a conversation
goes on from there. In pages any sequence finds what any other has left (`KvCache.match`). With
recurrent layers that is as much as there is a state of, too (`SharedStates`): pages are shared up
to there.

Every request has a *scope*, b"" unless it is given one. What one leaves is found by those of the
same scope alone: neither the counts nor the times of others tell what it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from urdir.driver.errors import DriverError
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.pages import common_length
from urdir.model.memory.prefix_states import PrefixStates
from urdir.model.memory.recurrent_state import RecurrentState
from urdir.model.memory.shared_states import SharedStates

#: What is left in a place: no tokens, of nobody.
_NOTHING: tuple[bytes, tuple[int, ...]] = (b"", ())


class SequenceStorage:
    """Room for the tokens of sequences, numbered from 0, in ``cache`` and ``states``.

    `match` begins a sequence and `release` ends it. Between them it grows by `reserve` and is cut
    by `truncate`.
    """

    def __init__(self, cache: KvCache, states: RecurrentState) -> None:
        self._cache = cache
        self._states = states
        self._shared: SharedStates | None = None
        if states.shape.layers and states.shape.shared is not None:
            self._shared = SharedStates(states, cache.share_len)
        # Pages alone are no beginning where there are states.
        self._share_len = 0 if states.shape.layers else cache.share_len
        places = cache.shape.sequences
        # Of released places: the tokens that are there, by the scope that may find them, and of how
        # many the last state may be.
        self._left: list[tuple[bytes, tuple[int, ...]]] = [_NOTHING] * places
        self._reached = [0] * places

    @property
    def most_tokens(self) -> int:
        """The longest that a sequence can become that has the storage for itself."""
        return self._cache.most_tokens

    @property
    def shared_states(self) -> PrefixStates | None:
        """The states that are kept for beginnings; None where no layer has any, or each sequence
        keeps its own."""
        return None if self._shared is None else self._shared.known

    # ---- requests take turns ----

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int = 0, scope: bytes = b""
    ) -> int:
        """Begin a sequence that was released with what is known of ``tokens`` in ``scope``, and
        room for ``end``; how many it has then. Raises ContextFullError unless room for ``spare``
        tokens of others is left, and DriverError: nothing is begun then."""
        (owner, left), reached = self._left[sequence], self._reached[sequence]
        common = common_length(left, tuple(tokens)) if left and owner == scope else 0
        found = self.kept(sequence, common, reached) if common else 0
        self._left[sequence] = _NOTHING
        self.truncate(sequence, found, reached)
        if found:
            self._cache.reserve(sequence, found, end)
        elif self._shared is None:
            known = tokens if self._share_len else ()
            found = self._cache.match(sequence, known, end, spare, scope)
        else:
            found = self._match_state(self._shared, sequence, tokens, end, spare, scope)
        if self._shared is not None:
            self._shared.begin(sequence, tokens, found, scope)
        return found

    def cut(self, sequence: int, start: int, end: int) -> int:
        """How far a step may go that processes a prompt's tokens from ``start`` on, up to ``end``:
        it ends where a state is to be kept."""
        cut = None if self._shared is None else self._shared.next_cut(sequence, start)
        return end if cut is None else min(cut, end)

    def next_shared(self, sequence: int, length: int) -> int:
        """The first length beyond ``length`` of a sequence that others of its scope will find, once
        it is computed and published; 0 where there is none."""
        if self._shared is None:
            return length + self._share_len if self._share_len else 0
        return self._shared.next_cut(sequence, length) or 0

    def keep_prefix(self, sequence: int, length: int) -> None:
        """The queued steps of a prompt end after ``length`` tokens: the state there is kept for
        whoever begins so, where it is to be. Raises DriverError."""
        if self._shared is None:
            self._states.keep(sequence, length)
        else:
            self._shared.keep(sequence, length)

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes = b"") -> None:
        """A sequence holds ``tokens`` from its first position on, computed: others of ``scope``,
        that of its `match`, may begin with them."""
        if self._shared is not None:
            tokens = tokens[: self._shared.publish(sequence, tokens, scope)]
        elif not self._share_len:
            tokens = ()
        self._cache.publish(sequence, tokens, scope)

    def release(
        self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes = b""
    ) -> None:
        """A sequence is not used any more: ``tokens`` are what it holds from its first position on,
        for others of ``scope``, and steps were queued for up to ``reached`` positions."""
        self.publish(sequence, tokens, scope)
        if self._shared is not None:
            self._shared.end(sequence)
        if self._cache.pools or not tokens:
            self.truncate(sequence, 0, reached)
        else:
            self._left[sequence], self._reached[sequence] = (scope, tuple(tokens)), reached

    # ---- a sequence that is in use ----

    def reserve(self, sequence: int, start: int, end: int) -> int:
        """Make positions ``start`` to ``end`` writable; see `KvCache.reserve`."""
        return self._cache.reserve(sequence, start, end)

    def kept(self, sequence: int, length: int, now: int) -> int:
        """How many of the first ``length`` tokens of ``now`` a sequence can be cut to: all of them;
        none where layers with a window no longer hold what the next token looks back on; with
        recurrent layers, as many as there is a state of."""
        return self._cache.kept(sequence, self._states.kept(sequence, length, now))

    def truncate(self, sequence: int, length: int, now: int) -> None:
        """Forget what a sequence of ``now`` tokens has from ``length`` on. Raises ModelError,
        nothing changed, where the first ``length`` tokens are not `kept`."""
        if self._cache.kept(sequence, length) == length:
            self._states.truncate(sequence, length, now)
        self._cache.truncate(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Make ``target`` hold the first ``length`` tokens of ``source``, all that it has."""
        self._cache.fork(source, target, length)
        self._states.fork(source, target, length)

    def _match_state(
        self,
        shared: SharedStates,
        sequence: int,
        tokens: Sequence[int],
        end: int,
        spare: int,
        scope: bytes,
    ) -> int:
        """`match` for an empty place, of as many tokens as there are both pages and a state of."""
        found, place = shared.known.find(tokens, self._cache.known(tokens, scope), scope)
        self._cache.match(sequence, tokens[:found], end, spare, scope)
        if found:
            try:
                shared.restore(sequence, place)
            except DriverError:
                self._cache.truncate(sequence, 0)
                raise
        return found
