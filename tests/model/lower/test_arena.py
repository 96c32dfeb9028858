"""Places in an arena: what may be used at the same time never shares bytes."""

from __future__ import annotations

import random

import pytest

from urdir.model.lower.arena import ALIGNMENT, Lifetime, place


def ancestors_of(rng: random.Random, count: int, reach: int) -> list[int]:
    """A random graph of launches: of each, those that are complete before it begins."""
    found: list[int] = []
    for launch in range(count):
        mask = 0
        for before in range(max(0, launch - reach), launch):
            if rng.random() < 0.4:
                mask |= found[before] | 1 << before
        found.append(mask)
    return found


def lifetimes_of(rng: random.Random, ancestors: list[int], buffers: int) -> list[Lifetime]:
    """Random buffers, each used by some launches of the graph."""
    found = []
    for _ in range(buffers):
        first = rng.randrange(len(ancestors))
        users = {first}
        for later in range(first + 1, min(len(ancestors), first + 6)):
            if ancestors[later] >> first & 1 and rng.random() < 0.6:
                users.add(later)
        earlier = -1
        for user in users:
            earlier &= ancestors[user]
        nbytes = rng.choice((1, 255, 256, 257, 4096, rng.randrange(1, 1 << 20)))
        mask = sum(1 << user for user in users)
        found.append(Lifetime(nbytes, first, max(users), mask, earlier))
    return found


def together(a: Lifetime, b: Lifetime, ancestors: list[int]) -> bool:
    """Whether launches that use the two may run at the same time, or alternate."""

    def users(of: Lifetime) -> list[int]:
        return [i for i in range(len(ancestors)) if of.users >> i & 1]

    def precedes(of: Lifetime, other: Lifetime) -> bool:
        return all(ancestors[j] >> i & 1 for i in users(of) for j in users(other))

    return not (precedes(a, b) or precedes(b, a))


@pytest.mark.parametrize("seed", range(40))
def test_buffers_in_use_together_have_bytes_of_their_own(seed: int) -> None:
    """In random graphs with branches. The pairs are compared by what the graph alone says."""
    rng = random.Random(seed)
    ancestors = ancestors_of(rng, rng.randrange(3, 40), rng.choice((2, 5, 40)))
    lifetimes = lifetimes_of(rng, ancestors, rng.randrange(1, 50))
    places = place(lifetimes)
    spans = [(at, at + of.nbytes) for at, of in zip(places.offsets, lifetimes, strict=True)]
    for number, (a, first) in enumerate(zip(lifetimes, spans, strict=True)):
        assert first[0] % ALIGNMENT == 0
        assert first[1] <= places.nbytes
        for b, second in zip(lifetimes[:number], spans[:number], strict=True):
            if together(a, b, ancestors):
                assert first[1] <= second[0] or second[1] <= first[0]


@pytest.mark.parametrize("seed", range(20))
def test_in_a_chain_the_room_is_near_the_most_bytes_in_use(seed: int) -> None:
    """``bound`` is counted launch by launch here. Not more than half of it is lost to gaps."""
    rng = random.Random(seed)
    count = 30
    ancestors = [(1 << launch) - 1 for launch in range(count)]
    lifetimes = lifetimes_of(rng, ancestors, 40)
    most = 0
    for launch in range(count):
        live = [of for of in lifetimes if of.first <= launch <= of.last]
        most = max(most, sum(-(-of.nbytes // ALIGNMENT) * ALIGNMENT for of in live))
    places = place(lifetimes)
    assert places.bound == most
    assert most <= places.nbytes <= 1.5 * most


def test_buffers_with_a_place_are_avoided_while_they_live() -> None:
    """An output at the start: what is dead before it may lie there, nothing else."""
    output = Lifetime(1000, 2, 4, 0b11100, 0b11, offset=0)
    before = Lifetime(500, 0, 1, 0b11, 0)
    beside = Lifetime(300, 1, 2, 0b110, 0b1)
    after = Lifetime(700, 3, 3, 0b1000, 0b111)
    places = place([output, before, beside, after])
    assert places.offsets[:2] == (0, 0)
    assert min(places.offsets[2:]) >= 1000
    assert places.offsets[3] == places.offsets[2]  # that one is not used any more


def test_a_plan_is_the_same_every_time() -> None:
    rng = random.Random(3)
    ancestors = ancestors_of(rng, 30, 5)
    lifetimes = lifetimes_of(rng, ancestors, 40)
    assert place(lifetimes) == place(lifetimes)


def test_a_buffer_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer 1 has 0 bytes"):
        place([Lifetime(4, 0, 0, 1, 0), Lifetime(0, 1, 1, 2, 1)])


def test_nothing_needs_nothing() -> None:
    assert place([]).nbytes == 0
