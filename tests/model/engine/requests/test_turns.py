"""Which answers have a row, where not all of them have one."""

from __future__ import annotations

from collections import Counter

import pytest

from urdir.model.engine.requests.turns import STEPS, Turns


@pytest.mark.parametrize(("answers", "rows"), [(9, 8), (17, 8), (11, 9), (112, 104), (3, 1)])
def test_all_have_had_as_many_rows(answers: int, rows: int) -> None:
    turns, had = Turns(), Counter[int](dict.fromkeys(range(answers), 0))
    for _ in range(STEPS * answers):
        chosen = turns.of(range(answers), rows)
        assert len(chosen) == rows
        had.update(chosen)
        assert max(had.values()) - min(had.values()) <= STEPS
    assert set(had.values()) == {STEPS * rows}


def test_rows_stay_for_a_turn() -> None:
    turns = Turns()
    chosen = [turns.of(range(9), 8) for _ in range(3 * STEPS)]
    assert [set(range(9)) - set(of) for of in chosen[::STEPS]] == [{0}, {1}, {2}]
    for at in range(0, len(chosen), STEPS):
        assert all(of == chosen[at] for of in chosen[at : at + STEPS])


def test_nobody_waits_twice_where_answers_come_and_go() -> None:
    """A turn that is cut short by another number of answers passes to the next ones."""
    turns = Turns()

    def left_out(answers: int) -> set[int]:
        return set(range(answers)) - set(turns.of(range(answers), 8))

    assert [left_out(count) for count in (9, 10, 8, 9)] == [{0}, {1, 2}, set(), {3}]
