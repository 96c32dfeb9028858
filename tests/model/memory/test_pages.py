"""The pool of pages by itself: no page is lost, shared wrongly or used twice, whatever happens."""

from __future__ import annotations

import timeit
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from urdir.model.errors import ContextFullError
from urdir.model.memory.host_slots import HostSlots, Move
from urdir.model.memory.pages import Match, PagePool
from urdir.model.memory.prefix_tree import Node

PAGE = 4
PAGES = 9

Tokens = tuple[int, ...]
Key = tuple[bytes, Tokens]  # what a key of the cache depends on, and who may read it
SCOPES = st.sampled_from([b"", b"", b"other"])
#: Prompts that often begin alike, by whole pages and by parts of one.
WHOLE = st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0)]), max_size=3)
PARTS = st.lists(st.integers(0, 1), min_size=1, max_size=PAGE)
LENGTHS = st.just(99) | st.integers(0, 4 * PAGE)  # all of them, or fewer
PROMPTS = st.builds(lambda whole, part: (*sum(whole, ()), *part), WHOLE, PARTS)


def blocks(tokens: int) -> int:
    return -(-tokens // PAGE)


class Holder:
    """A sequence of a scope: its pages, and its tokens, all of them computed."""

    def __init__(self, tokens: Tokens, pages: list[int], scope: bytes) -> None:
        self.tokens, self.pages, self.scope = tokens, pages, scope


class Pool(RuleBasedStateMachine):
    """Sequences over a small pool. ``content[page][place]`` is what a computed key depends on: all
    tokens up to its own; and the scope in which it was computed."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, PAGE)
        self.content: list[list[Key]] = [[(b"", ())] * PAGE for _ in range(PAGES)]
        self.living: list[Holder] = []
        self.queries = self.hits = 0

    def write(self, holder: Holder, start: int) -> None:
        """Compute the tokens from ``start`` on."""
        for at in range(start, len(holder.tokens)):
            key = (holder.scope, holder.tokens[: at + 1])
            self.content[holder.pages[at // PAGE]][at % PAGE] = key

    def copy(self, source: int, target: int) -> None:
        self.content[target] = list(self.content[source])

    @rule(target=holders, prompt=PROMPTS, spare=st.integers(0, 2), scope=SCOPES)
    def begin(self, prompt: Tokens, spare: int, scope: bytes) -> object:
        before = self.state()
        try:
            match = self.pool.match(prompt[:-1], blocks(len(prompt)), spare, scope)
        except ContextFullError:
            assert self.state() == before
            return multiple()
        assert self.pool.free >= spare
        assert match.tokens < len(prompt)
        self.queries += len(prompt) - 1
        self.hits += match.tokens
        if match.source is not None:
            self.copy(match.source, match.pages[match.tokens // PAGE])
        holder = Holder(prompt, match.pages, scope)
        self.living.append(holder)
        self.check(holder, match.tokens)
        self.write(holder, match.tokens)
        return holder

    @rule(holder=holders, length=LENGTHS, more=PROMPTS)
    def go_on_from(self, holder: Holder, length: int, more: Tokens) -> None:
        self.cut(holder, length)
        start = len(holder.tokens)
        held = len(holder.pages)
        wanted = blocks(start + len(more)) - held
        tail = start % PAGE and self.pool.is_shared(holder.pages[-1])
        before = self.state()
        try:
            fresh = self.pool.take(wanted + bool(tail))
        except ContextFullError:
            assert self.state() == before
            assert before[0] < wanted + bool(tail)
            return
        if tail:
            page = fresh.pop()
            self.copy(holder.pages[-1], page)
            self.pool.release([holder.pages[-1]])
            holder.pages[-1] = page
        elif start % PAGE:
            self.pool.forget(holder.pages[-1], start % PAGE)
        holder.pages += fresh
        holder.tokens += more
        self.write(holder, start)

    def cut(self, holder: Holder, length: int) -> None:
        holder.tokens = holder.tokens[:length]
        keep = blocks(len(holder.tokens))
        self.pool.release(holder.pages[keep:])
        del holder.pages[keep:]

    @rule(target=holders, holder=holders)
    def fork(self, holder: Holder) -> Holder:
        self.pool.share(holder.pages)
        self.living.append(Holder(holder.tokens, list(holder.pages), holder.scope))
        return self.living[-1]

    @rule(holder=holders, length=LENGTHS)
    def publish(self, holder: Holder, length: int) -> None:
        self.pool.publish(holder.tokens[:length], holder.pages, holder.scope)

    @rule(holder=consumes(holders))
    def release(self, holder: Holder) -> None:
        self.living = [other for other in self.living if other is not holder]
        self.pool.release(holder.pages)

    @rule(prompt=PROMPTS, scope=SCOPES)
    def what_is_published_is_found(self, prompt: Tokens, scope: bytes) -> None:
        try:
            match = self.pool.match(prompt, blocks(len(prompt)), scope=scope)
        except ContextFullError:
            return
        if match.source is not None:
            self.copy(match.source, match.pages[match.tokens // PAGE])
        self.write(Holder(prompt, match.pages, scope), match.tokens)
        self.pool.publish(prompt, match.pages, scope)
        self.pool.release(match.pages)
        again = self.pool.match(prompt, blocks(len(prompt)), scope=scope)
        assert again.tokens == len(prompt)
        self.check(Holder(prompt, again.pages, scope), len(prompt) // PAGE * PAGE)
        self.pool.release(again.pages)
        self.queries += 2 * len(prompt)
        self.hits += match.tokens + len(prompt)

    def check(self, holder: Holder, length: int) -> None:
        """The first tokens are computed from the right ones."""
        for at in range(length):
            key = (holder.scope, holder.tokens[: at + 1])
            assert self.content[holder.pages[at // PAGE]][at % PAGE] == key

    def state(self) -> tuple[object, ...]:
        pool = self.pool
        return pool.free, pool.kept, pool.queries, pool.hits, pool.evictions, list(pool._users)

    @invariant()
    def holders_keep_what_they_computed(self) -> None:
        for holder in self.living:
            self.check(holder, len(holder.tokens))

    @invariant()
    def every_page_is_held_kept_or_unused(self) -> None:
        pool = self.pool
        users = [0] * PAGES
        for holder in self.living:
            for page in holder.pages:
                users[page] += 1
        assert pool._users == users
        assert sorted([*pool._unused, *pool._kept]) == [p for p in range(PAGES) if not users[p]]
        assert (pool.used, pool.free, pool.pages) == (
            sum(map(bool, users)),
            PAGES - sum(map(bool, users)),
            PAGES,
        )
        assert (pool.queries, pool.hits) == (self.queries, self.hits)

    @invariant()
    def what_is_known_is_true(self) -> None:
        """Every path of a scope's tree holds its tokens, of that scope; a kept page goes before the
        one it follows. No tree is empty."""
        pool = self.pool
        order = {page: at for at, page in enumerate(pool._kept)}
        found = set()
        roots = [*pool.tree.roots.items()]
        assert all(root.children for _, root in roots)
        nodes = [(scope, child, ()) for scope, root in roots for child in root.children]
        while nodes:
            scope, node, before = nodes.pop()
            assert pool._nodes[node.page] is node
            assert node.page not in found
            found.add(node.page)
            path: Tokens = before + node.tokens
            for at in range(len(before), len(path)):
                assert self.content[node.page][at % PAGE] == (scope, path[: at + 1])
            assert not node.children or len(node.tokens) == PAGE
            keys = [child.tokens for child in node.children]
            assert keys == sorted(set(keys))
            for child in node.children:
                if {node.page, child.page} <= order.keys():
                    assert order[child.page] < order[node.page]
                nodes.append((scope, child, path))
        assert set(order) <= found
        assert found == {page for page, known in enumerate(pool._nodes) if known is not None}


Pool.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
test_any_use = Pool.TestCase


def hold(pool: PagePool, tokens: Tokens) -> Match:
    """Pages for a prompt, computed and published."""
    match = pool.match(tokens[:-1], blocks(len(tokens)))
    pool.publish(tokens, match.pages)
    return match


def test_the_longest_prefix_is_found_and_the_rest_of_a_page_copied() -> None:
    pool = PagePool(8, PAGE)
    first = hold(pool, (1, 2, 3, 4, 5, 6, 7, 8, 9))
    second = pool.match((1, 2, 3, 4, 5, 6, 0, 0, 0, 0), 3)
    assert (second.tokens, second.source) == (6, first.pages[1])
    assert second.pages[0] == first.pages[0]
    assert not set(second.pages[1:]) & set(first.pages)
    third = pool.match((1, 0, 0, 0), 1)  # one token of four is worth the copy
    assert (third.tokens, third.source) == (1, first.pages[0])
    fourth = pool.match((0, 2, 3, 4), 1)
    assert (fourth.tokens, fourth.source) == (0, None)
    assert (pool.queries, pool.hits) == (8 + 10 + 4 + 4, 0 + 6 + 1 + 0)
    assert (pool.used, pool.kept) == (3 + 2 + 1 + 1, 0)


def test_a_page_that_is_filled_further_is_known_by_all_its_tokens() -> None:
    pool = PagePool(4, PAGE)
    pages = hold(pool, (1, 2, 3, 4, 5)).pages
    pool.publish((1, 2, 3, 4, 5, 6, 7), pages)
    assert pool.match((1, 2, 3, 4, 5, 6, 7), 2).tokens == 7
    pool.publish((1, 2, 3, 4, 5), pages)  # less than is known
    assert pool.match((1, 2, 3, 4, 5, 6, 7), 2).tokens == 7


def test_the_least_recently_used_goes_first_the_end_of_a_prefix_before_its_beginning() -> None:
    pool = PagePool(5, PAGE)
    old, new = (0,) * 8, (1,) * 8
    pages = {tokens: hold(pool, tokens).pages for tokens in (old, new)}
    pool.release(pages[new])
    pool.release(pages[old])
    pool.release(pool.match(new, 2).pages)  # used again, so that `old` is the older one
    assert (pool.free, pool.kept, pool.evictions) == (5, 4, 0)
    taken = pool.take(2)
    assert pages[old][1] in taken
    assert pool.evictions == 1
    pool.take(1)
    assert pool.evictions == 2
    assert pool.match(new, 2).tokens == 2 * PAGE


@pytest.mark.parametrize("last", [0, 9])
def test_either_neighbour_may_agree_longest(last: int) -> None:
    pool = PagePool(8, PAGE)
    first = hold(pool, (5, 6, 7, 8))
    for other in ((5, 6, 6, 6), (5, 6, 8, 8)):
        hold(pool, other)
    match = pool.match((5, 6, 7, last), 1)
    assert (match.tokens, match.source) == (3, first.pages[0])


def test_what_is_written_over_is_forgotten_with_all_that_follows() -> None:
    pool = PagePool(3, PAGE)
    tokens = (1,) * 10
    pages = hold(pool, tokens).pages
    pool.forget(pages[2], 2)  # what comes after the known ones
    pool.forget(pages[1], 4)
    assert pool.match(tokens[:8], 2).tokens == 8
    pool.forget(pages[2], 1)
    assert pool.tree.find(tokens, b"")[1:] == (None, 0)
    pool.forget(pages[0], 3)
    assert pool.tree.find(tokens, b"") == ([], None, 0)
    assert not any(pool._nodes)


def test_the_page_to_copy_goes_last() -> None:
    pool = PagePool(2, PAGE)
    for tokens in ((1, 1, 1), (2, 2, 2)):
        pool.release(hold(pool, tokens).pages)
    match = pool.match((1, 1, 2), 1)
    assert match.source not in (None, *match.pages)


def test_a_page_whose_twin_is_known_keeps_the_known_one_in_use() -> None:
    """Two computed the same beginning, and one went on: its end is found by the other's pages."""
    pool = PagePool(5, PAGE)
    first, second = (pool.take(count) for count in (1, 2))
    pool.publish((1,) * 4, first)
    pool.publish((1,) * 8, second)
    pool.release(first)
    unused = pool.take(1)
    pool.publish((2,) * 4, unused)
    pool.release(unused)
    pool.release(second)
    assert list(pool._kept) == [unused[0], second[1], first[0]]


def test_a_page_that_is_taken_and_copied_at_once_needs_no_copy() -> None:
    pool = PagePool(1, PAGE)
    pool.release(hold(pool, (1, 2, 3)).pages)
    assert pool.match((1, 2, 0), 1) == Match([0], 2, None)


def test_prefixes_that_others_hold_are_no_room() -> None:
    pool = PagePool(3, PAGE)
    pool.release(hold(pool, (1,) * 12).pages)
    assert pool.free == 3
    with pytest.raises(ContextFullError, match="4 pages of 4 tokens are needed, 3 of 3 are free"):
        pool.match((1,) * 12, 3, spare=1)
    match = pool.match((1,) * 12, 3)
    assert (match.tokens, pool.free) == (12, 0)


def test_taking_is_as_fast_in_a_large_pool() -> None:
    """Ten thousand times the pages, and at most a few times the time."""
    seconds = []
    for pages in (100, 1_000_000):
        pool = PagePool(pages, PAGE)
        seconds.append(min(timeit.repeat(lambda p=pool: p.release(p.take(8)), number=200)))
    assert seconds[1] < 10 * seconds[0]


class Slots(HostSlots[Node]):
    """Slots whose contents are the pages that were copied to them."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.of: dict[int, int | None] = {}

    def receive(self, moves: Sequence[Move[Node]]) -> None:
        assert len({move.slot for move in moves}) == len(moves)
        self.of |= {move.slot: move.pages[0] for move in moves}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_page_before_one_that_is_used_does_not_move(slots: int) -> None:
    """Two sequences computed the same beginning; the second has a page after that of the first,
    which is evicted: the tree has no page whose parent is on the host."""
    pool = PagePool(3, PAGE, host=Slots(slots))
    tokens = tuple(range(2 * PAGE))
    first, second = pool.match((), 1).pages, pool.match((), 2).pages
    pool.publish(tokens[:PAGE], first)
    pool.publish(tokens, second)
    pool.release(first)
    assert pool.take(1) == first
    assert pool.find(tokens, has_slots=False).tokens(PAGE) == 0
    pool.publish(tokens, second)
    pool.release(second)
    assert [node.page for node in pool.find(tokens, has_slots=False).nodes] == second
    assert sorted(pool.take(2)) == sorted(second)
    assert pool.known(tokens) == PAGE * min(slots, 2)


def test_a_slot_that_is_free_again_has_one_page() -> None:
    """Pages after one that cannot move leave the tree, and their slots, before they are copied."""
    pool = PagePool(5, PAGE, host=(host := Slots(2)))
    tokens, other = tuple(range(2 * PAGE)), (7, 7, 7, 7)
    before = pool.match((), 1).pages
    pool.publish(tokens[:PAGE], before)
    one, two = pool.match((), 2).pages, pool.match((), 2).pages
    pool.publish(tokens, one)
    pool.publish((*tokens[:PAGE], *other), two)
    pool.release(one)
    pool.release(before)
    assert pool.take(3)
    assert host.used == 0
    assert host.of == {}
