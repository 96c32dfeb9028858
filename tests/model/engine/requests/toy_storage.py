"""What the scheduler's tests have in place of a device's memory: pages, places and states.

The model is a hash: what it "computes" for a token depends on what the memory holds for the one
before it, and the next token depends on that. So an answer comes out right only where every page,
place and state held what it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from urdir.model.memory.pages import PagePool
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.model.memory.storage import SequenceStorage

UNWRITTEN = -1


@dataclass
class ToyStorage:
    """Pages as the scheduler sees them; ``states[page][place]`` is what was computed there."""

    pages: int
    page_len: int
    slots: int
    shares: bool = True
    table: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages, self.page_len)
        self.table = [[] for _ in range(self.slots)]
        self.states = [[UNWRITTEN] * self.page_len for _ in range(self.pages)]

    @property
    def most_tokens(self) -> int:
        return self.pages * self.page_len

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return length + self.page_len if self.shares else 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_len)

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        assert not self.table[sequence]
        known = tokens if self.shares else ()
        match = self.pool.match(known, self.blocks(end), self.blocks(spare), scope)
        if match.source is not None:
            target = match.pages[match.tokens // self.page_len]
            self.states[target] = list(self.states[match.source])
        self.table[sequence] = match.pages
        return match.tokens

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None:
        if self.shares:
            self.pool.publish(tokens, self.table[sequence], scope)

    def reserve(self, sequence: int, start: int, end: int) -> int:
        held = self.table[sequence]
        held += self.pool.take(max(0, self.blocks(end) - len(held)))
        return len(held) * self.page_len

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None:
        assert len(tokens) <= reached
        self.publish(sequence, tokens, scope)
        self.pool.release(self.table[sequence])
        self.table[sequence] = []

    def read(self, sequence: int, position: int) -> int:
        page = self.table[sequence][position // self.page_len]
        return self.states[page][position % self.page_len]

    def write(self, sequence: int, position: int, state: int) -> None:
        page = self.table[sequence][position // self.page_len]
        assert not self.pool.is_shared(page)
        self.states[page][position % self.page_len] = state

    def segment(self, sequence: int, end: int) -> None:
        """A step has computed a prompt up to ``end``."""

    @property
    def held(self) -> list[bool]:
        """Whether each sequence has pages."""
        return [bool(pages) for pages in self.table]

    def check(self) -> None:
        """Every page is held as often as sequences have it."""
        users = [0] * self.pages
        for held in self.table:
            for page in held:
                users[page] += 1
        assert self.pool._users == users
        assert self.pool.used == sum(map(bool, users))


class ToyCache(ToyStorage):
    """The same as a `KvCache`, for a storage of states beside it."""

    @property
    def shape(self) -> Any:
        return SimpleNamespace(sequences=self.slots)

    @property
    def share_len(self) -> int:
        return self.page_len

    @property
    def pools(self) -> tuple[PagePool, ...]:
        return (self.pool,)

    def known(self, tokens: Sequence[int], scope: bytes) -> int:
        return self.pool.known(tokens, scope)

    def finds(self, tokens: Sequence[int], scope: bytes) -> bool:
        return self.pool.find(tokens, scope).tokens(self.page_len) == len(tokens)

    def kept(self, sequence: int, length: int) -> int:
        return length

    def truncate(self, sequence: int, length: int) -> None:
        keep = self.blocks(length)
        self.pool.release(self.table[sequence][keep:])
        del self.table[sequence][keep:]


class ToyStates:
    """As a `RecurrentState`: a sequence has what was computed for its last token alone, and copies
    of that are kept in places."""

    def __init__(self, slots: int, places: int) -> None:
        self.shape = RecurrentShape({0: {"state": 4}}, slots, places)
        self.last = [UNWRITTEN] * slots
        self.kept_ones = [UNWRITTEN] * places

    def save(self, sequence: int, place: int) -> None:
        self.kept_ones[place] = self.last[sequence]

    def restore(self, place: int, sequence: int) -> None:
        self.last[sequence] = self.kept_ones[place]

    def kept(self, sequence: int, length: int, now: int) -> int:
        return length if length >= now else 0

    def truncate(self, sequence: int, length: int, now: int) -> None:
        assert length in (0, now)


class ToyRecurrent(SequenceStorage):
    """A model with pages and states: an answer comes out right only where both are those of its
    tokens. ``places`` states are kept."""

    def __init__(self, pages: int, page_len: int, slots: int, places: int) -> None:
        self.slots, self.page_len = slots, page_len
        self.cache, self.states = ToyCache(pages, page_len, slots), ToyStates(slots, places)
        super().__init__(self.cache, self.states)  # type: ignore[arg-type]

    @property
    def pool(self) -> PagePool:
        return self.cache.pool

    @property
    def held(self) -> list[bool]:
        return self.cache.held

    def read(self, sequence: int, position: int) -> int:
        assert self.cache.read(sequence, position) == self.states.last[sequence]
        return self.states.last[sequence]

    def write(self, sequence: int, position: int, state: int) -> None:
        self.cache.write(sequence, position, state)
        self.states.last[sequence] = state

    def segment(self, sequence: int, end: int) -> None:
        self.keep_prefix(sequence, end)

    def check(self) -> None:
        """Every place is known, given by a step under way, or unused."""
        self.cache.check()
        assert self._shared is not None
        known = self._shared.known
        given = [place for held in self._shared._given for _, place in held]
        assert sorted([*known._unused, *known._known, *given]) == [*range(known.places)]


class ToyPlaces:
    """A contiguous cache: a sequence goes on from what its own place was left with."""

    def __init__(self, slots: int, most_tokens: int) -> None:
        self.slots, self.most_tokens = slots, most_tokens
        self.states = [[UNWRITTEN] * most_tokens for _ in range(slots)]
        self.left: list[tuple[bytes, Sequence[int]]] = [(b"", ())] * slots
        self.held = [False] * slots

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes
    ) -> int:
        assert not self.held[sequence]
        self.held[sequence] = True
        owner, left = self.left[sequence]
        pairs = zip(left if owner == scope else (), tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def cut(self, sequence: int, start: int, end: int) -> int:
        return end

    def next_shared(self, sequence: int, length: int) -> int:
        return 0

    def segment(self, sequence: int, end: int) -> None: ...

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None:
        assert self.held[sequence]

    def reserve(self, sequence: int, start: int, end: int) -> int:
        assert self.held[sequence]
        assert end <= self.most_tokens
        return end

    def release(self, sequence: int, tokens: Sequence[int], reached: int, scope: bytes) -> None:
        """What steps under way write from now on lies past ``tokens``."""
        assert self.held[sequence]
        assert len(tokens) <= reached
        self.held[sequence], self.left[sequence] = False, (scope, tokens)
        self.states[sequence][reached:] = [UNWRITTEN] * (self.most_tokens - reached)

    def read(self, sequence: int, position: int) -> int:
        return self.states[sequence][position]

    def write(self, sequence: int, position: int, state: int) -> None:
        self.states[sequence][position] = state

    def check(self) -> None:
        """Nobody holds what is another's."""


Toy = ToyStorage | ToyPlaces | ToyRecurrent
