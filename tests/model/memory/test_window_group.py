"""Pages of layers with windows beside those of others: whatever happens, a sequence has what its
next token attends to, and a prefix that is found has it, too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from urdir.model.errors import ContextFullError
from urdir.model.memory.cache_groups import LeadingGroup
from urdir.model.memory.cache_shape import CachedLayer, Window
from urdir.model.memory.cached_prefixes import CachedPrefixes
from urdir.model.memory.host_slots import HostSlots, Move
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.pages import PagePool
from urdir.model.memory.prefix_tree import Node
from urdir.model.memory.window_group import WindowGroup
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

#: A window of a page and a half; steps of a page and a half, two tokens of drafts.
PAGE, SPAN, LAG, ROWS, MOST = 16, 24, 2, 24, 256
SEQUENCES, PAGES, WINDOW_PAGES = 4, 34, 17
WINDOW = Window.of(SPAN, ROWS, LAG, PAGE)
LAYOUT = KvLayout(SEQUENCES, 1, MOST, 8, "f16", PAGE, PAGES)
WINDOW_LAYOUT = KvLayout(SEQUENCES, 1, MOST, 8, "f16", PAGE, WINDOW_PAGES)

Tokens = tuple[int, ...]
Key = tuple[bytes, Tokens]  # what a key of the cache depends on, and who may read it
SCOPES = st.sampled_from([b"", b"", b"other"])
WHOLE = st.lists(st.sampled_from([(0,) * 16, (0,) * 9 + (1,) * 7]), max_size=7)
PARTS = st.builds(lambda first, count: (first,) * count, st.integers(0, 1), st.integers(1, PAGE))
PROMPTS = st.builds(lambda whole, part: (*sum(whole, ()), *part), WHOLE, PARTS)
SLOTS = st.integers(0, SEQUENCES - 1)


class Contents:
    """What the pages of a group hold: ``of[page][place]``."""

    def __init__(self, group: Any, pages: int) -> None:
        self.group = group
        self.of: list[list[Key]] = [[(b"", ())] * PAGE for _ in range(pages)]
        group._copy_slots = self.copy

    def copy(self, source: int, target: int) -> None:
        self.of[target] = list(self.of[source])

    def page(self, sequence: int, position: int) -> list[Key]:
        held = self.group._pages[sequence]
        return self.of[held[position // PAGE - self.group._first[sequence]]]

    def write(self, sequence: int, tokens: Tokens, scope: bytes, start: int, end: int) -> None:
        for at in range(start, end):
            self.page(sequence, at)[at % PAGE] = scope, tokens[: at + 1]

    def check(self, sequence: int, tokens: Tokens, scope: bytes, start: int) -> None:
        for at in range(start, len(tokens)):
            assert self.page(sequence, at)[at % PAGE] == (scope, tokens[: at + 1])


class ToyHost(HostSlots[Node]):
    """Slots whose contents are lists, in place of `HostPages`."""

    def __init__(self, count: int, leading: Contents, window: Contents) -> None:
        super().__init__(count)
        self.groups = leading, window
        self.of: list[list[list[Key] | None]] = [[None, None]] * count

    def receive(self, moves: Sequence[Move[Node]]) -> None:
        for move in moves:
            pairs = zip(self.groups, move.pages, strict=True)
            self.of[move.slot] = [
                None if page is None else list(group.of[page]) for group, page in pairs
            ]

    def give(self, moves: Sequence[Move[Node]]) -> None:
        for move in moves:
            for group, page, content in zip(
                self.groups, move.pages, self.of[move.slot], strict=True
            ):
                if page is not None:
                    assert content is not None
                    group.of[page] = list(content)
            self.free(move.slot)


class Held:
    """A sequence of a scope: of ``tokens`` the first ``stored`` are computed or will be by steps in
    flight, ``complete`` of them for certain; the first ``prompt`` come by segments."""

    def __init__(self, tokens: Tokens, found: int, scope: bytes) -> None:
        self.tokens, self.scope, self.prompt = tokens, scope, len(tokens)
        self.stored = self.complete = found


class Windows(RuleBasedStateMachine):
    """Sequences as a scheduler has them."""

    slots = 0  # of the host

    def __init__(self) -> None:
        super().__init__()
        layers = {0: CachedLayer(WINDOW_LAYOUT, SPAN, WINDOW)}
        nothing: Any = None
        window = WindowGroup(nothing, nothing, layers, WINDOW, nothing)
        pool = PagePool(PAGES, PAGE, [window.pool])
        leading = LeadingGroup(nothing, nothing, {}, LAYOUT, pool, None)
        self.window, self.leading = Contents(window, WINDOW_PAGES), Contents(leading, PAGES)
        self.cache = KvCache.__new__(KvCache)
        shape: Any = SimpleNamespace(sequences=SEQUENCES, max_len=MOST, share_len=PAGE)
        vars(self.cache).update(
            shape=shape,
            followers=(),
            _groups=[window, leading],
        )
        host: Any = ToyHost(self.slots, self.leading, self.window) if self.slots else None
        self.cache.prefixes = CachedPrefixes(leading, [window], host)
        self.held: dict[int, Held] = {}

    @rule(slot=SLOTS, prompt=PROMPTS, scope=SCOPES)
    def begin(self, slot: int, prompt: Tokens, scope: bytes) -> None:
        if slot in self.held:
            return
        try:
            found = self.cache.match(slot, prompt[:-1], len(prompt), 0, scope)
        except ContextFullError:
            assert not any(group.is_written(slot) for group in self.cache._groups)
            return
        assert found < len(prompt)
        self.held[slot] = Held(prompt, found, scope)
        self.check(slot)

    @rule(slot=SLOTS, count=st.integers(1, ROWS), more=PARTS)
    def step(self, slot: int, count: int, more: Tokens) -> None:
        """A segment of a prompt, or tokens of an answer."""
        if (held := self.held.get(slot)) is None:
            return
        if held.stored >= held.prompt:
            held.complete = max(held.complete, held.stored - LAG)
            held.tokens = held.tokens[: held.stored] + more[: LAG + 1]
        start, end = held.stored, min(len(held.tokens), held.stored + count)
        try:
            self.cache.reserve(slot, start, end)
        except ContextFullError:
            return
        for contents in (self.window, self.leading):
            contents.write(slot, held.tokens, held.scope, start, end)
        held.stored = end

    @rule(slot=SLOTS, tokens=st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def reject(self, slot: int, tokens: Tokens) -> None:
        """The last tokens of an answer were drafts, in place of which others are computed."""
        held = self.held.get(slot)
        if held is None or held.stored < held.prompt + LAG or held.complete > held.stored - LAG:
            return
        start = held.stored - LAG
        held.tokens = held.tokens[:start] + tokens
        for contents in (self.window, self.leading):
            contents.write(slot, held.tokens, held.scope, start, held.stored)

    @rule(slot=SLOTS)
    def complete(self, slot: int) -> None:
        """Steps are read: segments are published."""
        if (held := self.held.get(slot)) is None:
            return
        held.complete = held.stored
        if held.stored <= held.prompt:
            self.cache.publish(slot, held.tokens[: held.stored], held.scope)

    @rule(slot=SLOTS, shares=st.booleans())
    def release(self, slot: int, shares: bool) -> None:
        if (held := self.held.pop(slot, None)) is None:
            return
        if shares:
            self.cache.publish(slot, held.tokens[: held.complete], held.scope)
        self.cache.truncate(slot, 0)

    @rule(source=SLOTS, other=SLOTS)
    def fork(self, source: int, other: int) -> None:
        if source not in self.held or other in self.held:
            return
        held = self.held[source]
        held.complete = held.stored  # drafts and forks are not of the same sessions
        self.cache.fork(source, other, held.stored)
        copy = Held(held.tokens[: held.stored], held.stored, held.scope)
        self.held[other] = copy

    @rule(prompt=PROMPTS)
    @precondition(lambda self: len(self.held) < SEQUENCES)
    def what_was_computed_last_is_found(self, prompt: Tokens) -> None:
        slot = next(slot for slot in range(SEQUENCES) if slot not in self.held)
        self.begin(slot, prompt, b"")
        while slot in self.held and self.held[slot].stored < len(prompt):
            before = self.held[slot].stored
            self.step(slot, ROWS, ())
            self.complete(slot)
            if self.held[slot].stored == before:
                return
        if slot not in self.held:
            return
        self.release(slot, True)
        if self.begin(slot, (*prompt, 2), b"") is None and slot in self.held:
            # a page in part filled may be another's, which has gone on otherwise
            assert self.held[slot].stored >= len(prompt) // PAGE * PAGE

    def check(self, slot: int) -> None:
        held = self.held[slot]
        tokens = held.tokens[: held.stored]
        first = max(0, max(held.complete, held.stored - LAG) + 1 - SPAN)
        self.leading.check(slot, tokens, held.scope, 0)
        self.window.check(slot, tokens, held.scope, first)

    @invariant()
    def sequences_have_what_they_attend_to(self) -> None:
        for slot in self.held:
            self.check(slot)

    @invariant()
    def pages_are_held_kept_or_unused(self) -> None:
        for contents in (self.window, self.leading):
            pool = contents.group.pool
            users = [0] * pool.pages
            for pages in contents.group._pages:
                for page in pages:
                    users[page] += 1
            assert pool._users == users
            free = sorted([*pool._unused, *pool._kept])
            assert free == [page for page in range(pool.pages) if not users[page]]

    @invariant()
    def a_window_holds_a_bounded_number_of_pages(self) -> None:
        for slot, held in self.held.items():
            count = len(self.window.group._pages[slot])
            unpublished = held.prompt if held.stored < held.prompt else 0
            assert count <= WINDOW.most_pages + unpublished // PAGE

    @invariant()
    def what_is_known_is_true(self) -> None:
        tree, kept = self.leading.group.pool, self.window.group.pool
        known = 0
        nodes = [(s, n, ()) for s, root in tree.tree.roots.items() for n in root.children]
        while nodes:
            scope, node, before = nodes.pop()
            path: Tokens = (*before, *node.tokens)
            if node.is_on_device:
                pages = [self.leading.of[node.page]]
                assert tree._nodes[node.page] is node
            else:
                assert self.cache.prefixes is not None
                host: Any = self.cache.prefixes.host
                leading, window = host.of[host._slots[node]]
                pages = [leading, *([window] if node in kept._hosted else [])]
                assert not any(child.is_on_device for child in node.children)
            if node in kept._pages:
                known += 1
                pages.append(self.window.of[kept._pages[node]])
                assert kept._nodes[kept._pages[node]] is node
            for at in range(len(before), len(path)):
                for page in pages:
                    assert page[at % PAGE] == (scope, path[: at + 1])
            nodes += [(scope, child, path) for child in node.children]
        assert known == len(kept._pages) == sum(node is not None for node in kept._nodes)


class WindowsWithHost(Windows):
    """The same with a few slots in host memory."""

    slots = 5

    @rule(count=st.integers(1, PAGES))
    def others_need_pages(self, count: int) -> None:
        for contents in (self.leading, self.window):
            pool = contents.group.pool
            taken = pool.take(min(count, pool.free))
            for page in taken:
                contents.of[page] = [(b"", ())] * PAGE
            pool.release(taken)

    @invariant()
    def slots_are_filled_or_unused(self) -> None:
        assert self.cache.prefixes is not None
        host: Any = self.cache.prefixes.host
        assert self.window.group.pool._hosted <= host._slots.keys()
        assert sorted([*host._unused, *host._slots.values()]) == [*range(self.slots)]


for kind in (Windows, WindowsWithHost):
    kind.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
test_any_use, test_any_use_with_host = Windows.TestCase, WindowsWithHost.TestCase


def test_slots_that_are_claimed_are_not_filled() -> None:
    host = HostSlots[Node](1)
    first, second = (Node(None, (number,), -1) for number in range(2))
    assert host.put(first) == (0, None)
    slot = host.claim(first)
    assert host.put(second) is None
    host.free(slot)
    assert host.put(second) == (0, None)


def test_the_first_slot_that_was_filled_is_evicted_first() -> None:
    """As a list of slots by age has it, whatever is claimed or dropped in between."""
    rng = np.random.default_rng(3)
    host, ages, nodes = HostSlots[Node](5), list[Node](), list[Node]()
    for number in range(300):
        operation = rng.integers(4)
        if operation < 2:
            nodes.append(Node(None, (number,), -1))
            filled = host.put(nodes[-1])
            assert filled is not None
            _, lost = filled
            wanted = ages.pop(0) if len(ages) == 5 else None
            assert lost is wanted
            ages.append(nodes[-1])
        elif ages and operation == 2:
            node = ages.pop(int(rng.integers(len(ages))))
            host.free(host.claim(node))
        elif nodes:
            node = nodes[int(rng.integers(len(nodes)))]
            host.drop(node)
            ages = [other for other in ages if other is not node]
        assert host.used == len(ages)
        assert list(host._slots) == ages
