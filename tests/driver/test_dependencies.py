"""Edges against a brute-force reference: every pair of operations, every byte."""

from __future__ import annotations

import random

import pytest

from urdir.driver.dependencies import Edge, Hazard, Use, find_edges, missing_edges


def conflict(a: list[Use], b: list[Use]) -> bool:
    return any(
        max(u.start, v.start) < min(u.stop, v.stop) and (u.writes or v.writes) for u in a for v in b
    )


def closure(count: int, edges: set[tuple[int, int]]) -> list[set[int]]:
    """For each operation, everything that an edge path leads to it from."""
    ancestors: list[set[int]] = [set() for _ in range(count)]
    for after in range(count):
        for before in range(after):
            if (before, after) in edges:
                ancestors[after] |= ancestors[before] | {before}
    return ancestors


def random_operations(rng: random.Random, count: int, space: int) -> list[list[Use]]:
    operations = []
    for _ in range(count):
        uses = []
        for _ in range(rng.randint(0, 4)):
            start = rng.randrange(space)
            reads = rng.random() < 0.6
            writes = not reads or rng.random() < 0.2
            uses.append(Use(start, start + rng.randint(0, space // 4), reads, writes))
        operations.append(uses)
    return operations


@pytest.mark.parametrize("seed", range(150))
def test_edges_are_the_transitive_reduction_of_all_conflicts(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    operations = random_operations(rng, count, rng.choice([8, 40, 1000]))
    conflicts = {
        (i, j) for j in range(count) for i in range(j) if conflict(operations[i], operations[j])
    }
    found = find_edges(operations)
    pairs = {(e.before, e.after) for e in found}

    assert len(pairs) == len(found)
    assert pairs <= conflicts
    expected = closure(count, conflicts)
    assert closure(count, pairs) == expected
    for before, after in pairs:  # no edge can be left out
        assert closure(count, pairs - {(before, after)}) != expected
        lost = missing_edges(found, pairs - {(before, after)}, len(operations))
        assert [(e.before, e.after) for e in lost] == [(before, after)]
    assert missing_edges(found, pairs, len(operations)) == ()
    assert missing_edges(found, conflicts, len(operations)) == ()
    assert list(found) == sorted(found, key=lambda e: (e.after, e.before))


@pytest.mark.parametrize(
    ("first", "second", "hazard"),
    [
        ((False, True), (True, False), Hazard.READ_AFTER_WRITE),
        ((False, True), (False, True), Hazard.WRITE_AFTER_WRITE),
        ((True, False), (False, True), Hazard.WRITE_AFTER_READ),
        ((True, True), (True, True), Hazard.READ_AFTER_WRITE),
        ((True, False), (True, False), None),
    ],
)
def test_hazards(
    first: tuple[bool, bool], second: tuple[bool, bool], hazard: Hazard | None
) -> None:
    edges = find_edges([[Use(0, 8, *first, "a")], [Use(7, 9, *second, "b")]])
    assert edges == (() if hazard is None else (Edge(0, 1, hazard, "b"),))


def test_neighbours_that_only_touch_do_not_conflict() -> None:
    assert find_edges([[Use(0, 8, False, True)], [Use(8, 16, True, True)]]) == ()


def test_no_bytes_no_conflict() -> None:
    assert find_edges([[Use(0, 8, False, True)], [Use(4, 4, True, True)]]) == ()


def test_no_access_no_conflict() -> None:
    assert find_edges([[Use(0, 8, False, True)], [Use(0, 8, False, False)]]) == ()


def test_a_kernel_in_place_does_not_wait_for_itself() -> None:
    assert find_edges([[Use(0, 8, True, False), Use(0, 8, False, True)]]) == ()


def test_a_reused_slice_waits_for_its_last_reader() -> None:
    operations = [
        [Use(0, 64, False, True, "q")],
        [Use(0, 64, True, False, "q"), Use(64, 128, False, True, "out")],
        [Use(32, 96, False, True, "gate")],  # lies over half of q and half of out
    ]
    assert [(e.before, e.after) for e in find_edges(operations)] == [(0, 1), (1, 2)]


def test_many_operations_stay_cheap() -> None:
    # A chain of 3000 launches over 8 slices, each reading its own weight and one shared scalar.
    operations = [
        [
            Use(1000 + i, 1001 + i, True, False),
            Use(0, 4, True, False),
            Use(100 + 8 * (i % 8), 108 + 8 * (i % 8), True, False),
            Use(100 + 8 * ((i + 1) % 8), 108 + 8 * ((i + 1) % 8), False, True),
        ]
        for i in range(3000)
    ]
    operations.append([Use(0, 4, True, True)])
    edges = find_edges(operations)
    assert [(e.before, e.after) for e in edges] == [(i, i + 1) for i in range(3000)]
