"""Sequences take turns on the host as on the device."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from urdir.model.memory.turns import Turns
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.sampling import pack_settings


@pytest.mark.parametrize(("rows", "answers"), [(8, 9), (8, 11), (8, 16), (4, 7), (16, 23)])
def test_the_device_goes_on_as_the_host_does(rows: int, answers: int) -> None:
    """From any step on: where a host writes the rows of its own, in the midst of turns."""
    kernel = Advance(max_len=200, rows=rows, sequences=answers, turns=True, places=answers + 2)
    settings = np.tile(pack_settings(), (answers, 1))
    for written in (0, 3):
        order, turns = Turns.of([(of, 2 * of) for of in range(answers)], rows)
        for _ in range(written):
            order, turns = turns.next([(of, at + 1) for of, at in order])
        places = np.array([*order, *turns.waiting, (0, 0), (0, 0)], np.uint32)
        state = {
            "sequence": places[:, 0],
            "position": places[:, 1],
            "tokens": np.zeros((answers, 200), np.uint32),
            "known": np.full(answers, 190, np.uint32),
            "turn": ((np.arange(rows) - turns.first) % rows).astype(np.uint32),
        }
        others = {"settings": settings, "sampled": np.zeros(rows, np.uint32)}
        waiting = np.array([answers - rows], np.uint32)
        for _ in range(2 * answers):
            state |= kernel.reference(**state, **others, waiting=waiting)
            order, turns = turns.next([(of, at + 1) for of, at in order])
            found = [*zip(state["sequence"].tolist(), state["position"].tolist(), strict=True)]
            assert found[:answers] == [*order, *turns.waiting]


@pytest.mark.parametrize(("rows", "answers"), [(8, 9), (8, 13), (8, 16), (96, 103)])
def test_all_have_as_many_rows_or_one_less(rows: int, answers: int) -> None:
    """Also when the turns begin anew, of the same answers or of some of them."""
    had = Counter(range(answers))
    had.subtract(range(answers))
    order, turns = Turns.of(range(answers), rows)
    for step in range(5 * answers):
        had.update(order)
        assert max(had.values()) - min(had.values()) <= 1
        if step % 7 == 6:
            following = turns.next(order)
            order, turns = Turns.of(turns.in_order(order), rows)
            assert ({*order}, {*turns.waiting}) == ({*following[0]}, {*following[1].waiting})
        else:
            order, turns = turns.next(order)
