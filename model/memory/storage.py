"""Storage of sequences on the device: keys and values, recurrent states, and reusable leftovers.

A slot of a sequence passes from one answer to the next. In a contiguous cache the contents stay
after release, so that the next turn of a conversation resumes from them. With pages any sequence
can reuse the pages of any other (`KvCache.match`), and with recurrent layers those up to a cached
state (`SharedStates`).

Every request has a *scope*, b"" by default. Only requests of the same scope can reuse its
leftovers: neither counts nor times of others reveal them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.driver.errors import DriverError
from urdir.model.errors import PrefixFileError
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.prefix_copy import Bytes, PrefixBytes
from urdir.model.memory.prefix_states import PrefixStates
from urdir.model.memory.prefix_tree import common_length
from urdir.model.memory.recurrent_state import RecurrentState
from urdir.model.memory.shared_states import SharedStates

if TYPE_CHECKING:
    from urdir.model.memory.host_pages import HostPages

#: The leftovers of an empty slot: no tokens.
_NOTHING: tuple[bytes, tuple[int, ...]] = (b"", ())


class SequenceStorage:
    """Room for the tokens of sequences, numbered from 0, in ``cache`` and ``states``. Shared states
    that are evicted move to a ``host``.

    `match` starts a sequence and `release` ends it. In between it grows by `reserve` and is cut by
    `truncate`.
    """

    def __init__(
        self, cache: KvCache, states: RecurrentState, host: HostPages[Any] | None = None
    ) -> None:
        self._cache = cache
        self._states = states
        self._shared: SharedStates | None = None
        if states.shape.layers and states.shape.shared is not None:
            self._shared = SharedStates(states, cache.share_len)
            self._shared.known.host = host
        # With recurrent layers pages alone are not a usable prefix.
        self._share_len = 0 if states.shape.layers else cache.share_len
        places = cache.shape.sequences
        # Of released slots: their tokens, by the scope that may reuse them, and the length of the
        # last possible state.
        self._left: list[tuple[bytes, tuple[int, ...]]] = [_NOTHING] * places
        self._reached = [0] * places
        self._ended: list[tuple[bytes, tuple[int, ...]]] = [_NOTHING] * places

    @property
    def most_tokens(self) -> int:
        """The longest possible sequence, with the storage to itself."""
        return self._cache.most_tokens

    @property
    def shared_states(self) -> PrefixStates | None:
        """The cached states of prefixes; None if no layer has any, or each sequence keeps its
        own."""
        return None if self._shared is None else self._shared.known

    # ---- start and end of requests ----

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int = 0, scope: bytes = b""
    ) -> int:
        """Start a released sequence with the longest reusable prefix of ``tokens`` in ``scope`` and
        room for ``end`` tokens; returns the prefix length. Raises ContextFullError unless room for
        ``spare`` tokens of others remains, and DriverError: nothing is started then."""
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
        """The end of a step that processes a prompt's tokens from ``start``, at most ``end``: steps
        end where a state should be saved."""
        cut = None if self._shared is None else self._shared.next_cut(sequence, start)
        return end if cut is None else min(cut, end)

    def next_shared(self, sequence: int, length: int) -> int:
        """The first length beyond ``length`` of a sequence that others of its scope will find, once
        it is computed and published; 0 if there is none."""
        if self._shared is None:
            return length + self._share_len if self._share_len else 0
        return self._shared.next_cut(sequence, length) or 0

    def keep_prefix(self, sequence: int, length: int) -> None:
        """Save the state after ``length`` tokens of a prompt, where its queued steps end, if that
        length was selected. Raises DriverError."""
        if self._shared is None:
            self._states.keep(sequence, length)
        else:
            self._shared.keep(sequence, length)

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes = b"") -> None:
        """Share ``tokens``, which a sequence has computed from its first position, with others of
        ``scope``, that of its `match`."""
        if self._shared is not None:
            tokens = tokens[: self._shared.publish(sequence, tokens, scope)]
        elif not self._share_len:
            tokens = ()
        self._cache.publish(sequence, tokens, scope)

    def release(
        self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes = b""
    ) -> None:
        """Release a sequence: ``tokens`` are its contents from the first position, reusable in
        ``scope``; steps were queued for up to ``reached`` positions."""
        self.publish(sequence, tokens, scope)
        if self._shared is not None:
            self._shared.end(sequence)
        self._ended[sequence] = (scope, tuple(tokens))
        if self._cache.pools or not tokens:
            self.truncate(sequence, 0, reached)
        else:
            self._left[sequence], self._reached[sequence] = (scope, tuple(tokens)), reached

    def learn(self, tokens: int, seconds: float) -> None:
        """A step computed this many tokens of prompts in that time. Caches of several devices,
        which decide alike, do not compare it with the rates of their copies."""
        if self._cache.prefixes is not None and not self._cache.followers:
            self._cache.prefixes.learn(tokens, seconds)

    # ---- saved prefixes ----

    def ended(self, sequence: int) -> tuple[bytes, tuple[int, ...]]:
        """What a sequence held when it last ended, with its scope."""
        return self._ended[sequence]

    def read_prefix(self, tokens: Sequence[int], scope: bytes) -> PrefixBytes:
        """What is cached of ``tokens`` in ``scope``; none may be. Raises ContextFullError,
        DriverError."""
        state: list[Bytes] = []
        if self._shared is not None:
            found, place = self._find_state(self._shared, tokens, scope)
            tokens = tokens[:found]
            state = self._states.read(place) if found else []
        found, arrays = len(tokens), list[Bytes]()
        if (prefixes := self._cache.prefixes) is not None:
            found, arrays = prefixes.read(tokens, scope)
        return PrefixBytes(tuple(tokens[:found]), [*arrays, *state])

    def prefix_shapes(self, length: int) -> list[tuple[int, ...]]:
        """The shapes of the arrays of a prefix of this many tokens."""
        prefixes = self._cache.prefixes
        shapes = list[tuple[int, ...]](() if prefixes is None else prefixes.shapes(length))
        if self._shared is not None and length:
            arrays = self._states.shape.layers.values()
            shapes += [(nbytes,) for layer in arrays for nbytes in layer.values()]
        return shapes

    def write_prefix(self, sequence: int, prefix: PrefixBytes, scope: bytes) -> None:
        """Cache a prefix for others of ``scope``, as what ``sequence`` held when it last ended.
        Raises ContextFullError, PrefixFileError for a state within a page, and DriverError."""
        if self._shared is not None and (over := len(prefix.tokens) % self._cache.share_len):
            raise PrefixFileError(f"a state {over} tokens after a page: states are at page ends")
        pages = 0
        if (prefixes := self._cache.prefixes) is not None:
            pages = len(prefixes.shapes(len(prefix.tokens)))
            prefixes.write(prefix.tokens, prefix.arrays[:pages], scope)
        if self._shared is not None and (place := self._shared.known.take()) is not None:
            try:
                self._states.write(place, prefix.arrays[pages:])
            except DriverError:
                self._shared.known.give_back(place)
                raise
            self._shared.known.know(prefix.tokens, place, scope)
        self._ended[sequence] = scope, prefix.tokens

    def erase(self, sequence: int) -> int:
        """Evict what a sequence held when it last ended; how many tokens that were."""
        scope, tokens = self._ended[sequence]
        self._ended[sequence] = _NOTHING
        states = 0 if self._shared is None else self._shared.known.erase(tokens, scope)
        prefixes = self._cache.prefixes
        return states if prefixes is None else prefixes.erase(tokens, scope)

    # ---- active sequences ----

    def reserve(self, sequence: int, start: int, end: int) -> int:
        """Make positions ``start`` to ``end`` writable; see `KvCache.reserve`."""
        return self._cache.reserve(sequence, start, end)

    def kept(self, sequence: int, length: int, now: int) -> int:
        """The length to which a sequence of ``now`` tokens can be cut, at most ``length``:
        ``length`` itself; 0 if layers with a window lack keys that the next token attends to; with
        recurrent layers, the length of a state."""
        return self._cache.kept(sequence, self._states.kept(sequence, length, now))

    def truncate(self, sequence: int, length: int, now: int) -> None:
        """Drop the tokens of a sequence of ``now`` tokens from ``length`` on. Raises ModelError,
        without effect, unless the first ``length`` tokens are `kept`."""
        if self._cache.kept(sequence, length) == length:
            self._states.truncate(sequence, length, now)
        self._cache.truncate(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy ``source``, which has ``length`` tokens, to ``target``."""
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
        """`match` for an empty slot, limited to prefixes that have both pages and a state."""
        found, place = self._find_state(shared, tokens, scope)
        self._cache.match(sequence, tokens[:found], end, spare, scope)
        if found:
            try:
                shared.restore(sequence, place)
            except DriverError:
                self._cache.truncate(sequence, 0)
                raise
        return found

    def _find_state(
        self, shared: SharedStates, tokens: Sequence[int], scope: bytes
    ) -> tuple[int, int]:
        """The longest prefix with both pages and a state: its length, and the state's slot."""
        held = self._cache.known(tokens, scope)
        return shared.known.find(
            *(tokens, held, scope), lambda length: self._cache.finds(tokens[:length], scope)
        )
