"""The books of kept states: every state is of the tokens that it is known by, whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from urdir.model.memory import prefix_states
from urdir.model.memory.host_slots import HostSlots, Move
from urdir.model.memory.prefix_states import PrefixStates, _Node

PAGE = 2
Tokens = tuple[int, ...]
SCOPES = st.sampled_from([b"", b"", b"other"])
#: Beginnings of up to five pages, which often begin alike; and what is asked for, also less.
PAGES = st.lists(st.sampled_from([(0, 0), (0, 1)]), min_size=1, max_size=5)
BEGINNINGS = PAGES.map(lambda pages: sum(pages, ()))
PROMPTS = st.builds(lambda whole, part: (*whole, *part), BEGINNINGS, st.sampled_from([(), (0,)]))
LENGTHS = st.integers(0, 5).map(lambda pages: pages * PAGE) | st.just(99)


class Books(RuleBasedStateMachine):
    """``known`` are beginnings with their scopes and places, the least recently used first."""

    @initialize(places=st.integers(0, 4))
    def start(self, places: int) -> None:
        self.states = PrefixStates(places, PAGE)
        self.known: list[tuple[Tokens, int, bytes]] = []
        self.taken: list[int] = []

    def longest(self, tokens: Tokens, most: int, scope: bytes) -> tuple[Tokens, int, bytes] | None:
        fitting = [
            (known, place, owner)
            for known, place, owner in self.known
            if owner == scope and len(known) <= most and tokens[: len(known)] == known
        ]
        return max(fitting, key=lambda found: len(found[0]), default=None)

    @rule(tokens=PROMPTS, held=LENGTHS, scope=SCOPES)
    def find(self, tokens: Tokens, held: int, scope: bytes) -> None:
        best = self.longest(tokens, held, scope)
        lost = (held // PAGE + 1) * PAGE
        expected = (len(best[0]), best[1]) if best else (0, -1)
        assert self.states.find(tokens, held, scope) == expected
        if lost <= len(tokens):
            gone = (tokens[:lost], scope)
            self.known = [known for known in self.known if (known[0][:lost], known[2]) != gone]
        if best:
            self.known.remove(best)
            self.known.append(best)

    @rule()
    def take(self) -> None:
        place = self.states.take()
        used = self.taken + [place for _, place, _ in self.known]
        if len(used) < self.states.places:
            assert place not in used
        elif self.known:
            assert place == self.known.pop(0)[1]
        else:
            assert place is None
        if place is not None:
            self.taken.append(place)

    @rule(tokens=BEGINNINGS, scope=SCOPES)
    def know(self, tokens: Tokens, scope: bytes) -> None:
        if not self.taken:
            return
        place = self.taken.pop()
        self.states.know(tokens, place, scope)
        mine = [known for known in self.known if (known[0], known[2]) == (tokens, scope)]
        others = [known for known in self.known if known not in mine]
        self.known = others + (mine or [(tokens, place, scope)])

    @rule()
    def give_back(self) -> None:
        if self.taken:
            self.states.give_back(self.taken.pop())

    @rule(tokens=PROMPTS, pages=st.integers(0, 5), scope=SCOPES)
    def cut(self, tokens: Tokens, pages: int, scope: bytes) -> None:
        """At the end of what another state is also of, and of the last page, in this order."""
        found = min(pages * PAGE, len(tokens) // PAGE * PAGE)
        cuts = self.states.cuts(tokens, found, scope)
        if not self.states.places:
            assert cuts == ()
            return
        ends = range(PAGE, len(tokens) + 1, PAGE)
        mine = [known for known, _, owner in self.known if owner == scope]
        alike = [n for n in ends if any(known[:n] == tokens[:n] for known in mine)]
        wanted = [max(alike, default=0), max(ends, default=0)]
        expected, last = [], found
        for length in wanted:
            if length >= last + prefix_states.LEAST_PAGES * PAGE:
                expected.append(length)
                last = length
        assert cuts == tuple(expected)

    @invariant()
    def nothing_leads_to_nowhere(self) -> None:
        """Pages that are remembered lead to states that are known."""
        if not hasattr(self, "states"):
            return
        assert self.states.known == len(self.known)
        nodes = [*self.states._roots.values()]
        assert all(root.children for root in nodes)
        while nodes:
            node = nodes.pop()
            assert node.children or node.place is not None or node.parent is None
            nodes += node.children.values()
        assert list(self.states._known) == [place for _, place, _ in self.known]


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_any_use = Books.TestCase


@pytest.fixture(scope="module", autouse=True)
def two_pages_are_worth_a_state() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_states, "LEAST_PAGES", 2)
        yield


def test_a_short_prompt_is_worth_no_state() -> None:
    """Nor is what exceeds another state by little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_states, "LEAST_PAGES", 8)
        states = PrefixStates(2, 64)
        assert states.cuts(range(511), 0) == ()
        assert states.cuts(range(512), 0) == (512,)
        assert states.cuts(range(1100), 512) == (1088,)
        assert states.cuts(range(1023), 512) == ()
        place = states.take()
        assert place is not None
        states.know(range(640), place)
        assert states.cuts([*range(600), *range(1000)], 0) == (576, 1600)
        assert states.cuts([*range(600), *range(400)], 0) == (576,)


def test_states_are_erased_up_to_where_others_go_on() -> None:
    states = PrefixStates(4, PAGE)
    tokens = tuple(range(4 * PAGE))
    for length in (PAGE, 2 * PAGE, 4 * PAGE):
        place = states.take()
        assert place is not None
        states.know(tokens[:length], place)
    other = (*tokens[:PAGE], *(99 for _ in range(PAGE)))
    place = states.take()
    assert place is not None
    states.know(other, place)
    assert states.erase((*tokens, 5)) == 4 * PAGE
    assert states.known == 2
    assert states.find(tokens, len(tokens))[0] == PAGE
    assert states.find(other, len(other))[0] == 2 * PAGE
    assert states.erase(other) == 2 * PAGE
    assert (states.known, len(states._unused)) == (0, 4)
    assert states.erase(other) == 0


class Slots(HostSlots[_Node]):
    """Slots of the host for states that are tuples of tokens, as those in ``places`` are."""

    def __init__(self, count: int, places: list[tuple[int, ...]]) -> None:
        super().__init__(count)
        self.places, self.of = places, [()] * count

    def receive(self, moves: Sequence[Move[_Node]]) -> None:
        for move in moves:
            assert move.pages[0] is not None
            self.of[move.slot] = self.places[move.pages[0]]

    def give(self, moves: Sequence[Move[_Node]]) -> None:
        for move in moves:
            assert move.pages[0] is not None
            self.places[move.pages[0]] = self.of[move.slot]
            self.free(move.slot)


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_states_come_back_from_the_host(slots: int) -> None:
    """What is found is the state after those tokens; with room for all, each is found that was ever
    known. No slot and no place is lost."""
    rng = np.random.default_rng(slots)
    places: list[tuple[int, ...]] = [()] * 3
    states, host = PrefixStates(3, PAGE), Slots(slots, places)
    states.host = host
    ever = set[tuple[int, ...]]()
    for _ in range(400):
        tokens = tuple(int(token) for token in np.repeat(rng.integers(0, 2, 4), PAGE))
        length = int(rng.integers(1, 5)) * PAGE
        if rng.random() < 0.5:
            place = states.take()
            assert place is not None
            places[place] = tokens[:length]
            states.know(tokens[:length], place)
            ever.add(tokens[:length])
        else:
            found, place = states.find(tokens, length)
            wanted = [of for of in ever if of == tokens[: len(of)] and len(of) <= length]
            if found:
                assert places[place] == tokens[:found]
                assert tokens[:found] in ever
            beyond = tokens[: length + PAGE]  # without pages
            if len(beyond) > length:
                ever -= {of for of in ever if of[: len(beyond)] == beyond}
            if slots == 40:
                assert found == max(map(len, wanted), default=0)
        assert sorted([*states._unused, *states._known]) == [0, 1, 2]
        assert sorted([*host._unused, *host._slots.values()]) == [*range(slots)]


def test_a_state_that_comes_back_stays_where_it_was() -> None:
    """The state of the only longer prefix has to leave the host for it."""
    places: list[tuple[int, ...]] = [()]
    states, host = PrefixStates(1, PAGE), Slots(2, places)
    states.host = host
    short, other = tuple(range(PAGE)), (9,) * PAGE
    for tokens in ((*short, *short), short, other):
        place = states.take()
        assert place is not None
        places[place] = tokens
        states.know(tokens, place)
    for _ in range(2):
        assert states.find((*short, 1), PAGE) == (PAGE, 0)
    assert places[0] == short
