"""States of recurrent layers: kept, restored, forked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from urdir.driver import Device
from urdir.model.errors import ModelError
from urdir.model.memory.recurrent_state import RecurrentShape, RecurrentState

SHAPE = RecurrentShape({0: {"tail": 32}, 3: {"tail": 16, "state": 64}}, 3)


@pytest.fixture
def state() -> Iterator[RecurrentState]:
    with (
        Device.open("emulator") as device,
        device.create_stream() as stream,
        RecurrentState(device, SHAPE, stream) as state,
    ):
        for layer, arrays in SHAPE.layers.items():
            for name in arrays:
                state.arguments(layer)[name].fill(0)
        yield state


def write(state: RecurrentState, sequence: int, value: float) -> None:
    for layer, arrays in SHAPE.layers.items():
        for name, nbytes in arrays.items():
            values = np.full(nbytes // 4, value, np.float32)
            state.arguments(layer)[name].upload(values, offset=sequence * nbytes)


def read(state: RecurrentState, sequence: int) -> float:
    found = set()
    for layer, arrays in SHAPE.layers.items():
        for name in arrays:
            array = state.arguments(layer)[name].download(np.float32).reshape(3, -1)
            found |= set(array[sequence].tolist())
    assert len(found) == 1
    return float(found.pop())


def test_sizes_are_of_all_sequences_twice() -> None:
    assert SHAPE.nbytes == 112
    assert sum(SHAPE.sizes().values()) == 2 * 3 * SHAPE.nbytes


def test_a_sequence_goes_back_to_the_state_that_was_kept(state: RecurrentState) -> None:
    write(state, 1, 5.0)
    state.keep(1, 20)
    write(state, 1, 6.0)
    assert [state.kept(1, length, 30) for length in (40, 30, 29, 20, 19, 0)] == [
        40,
        30,
        20,
        20,
        0,
        0,
    ]
    with pytest.raises(ModelError, match=r"cannot be cut to 25 tokens.* after 30, and after 20"):
        state.truncate(1, 25, 30)
    assert read(state, 1) == 6.0
    state.truncate(1, 30, 30)
    assert read(state, 1) == 6.0
    state.truncate(1, 20, 30)
    assert read(state, 1) == 5.0
    assert read(state, 0) == 0.0
    assert state.kept(1, 25, 30) == 20


def test_an_emptied_sequence_keeps_nothing(state: RecurrentState) -> None:
    state.keep(2, 10)
    state.truncate(2, 0, 15)
    assert state.kept(2, 12, 15) == 0


def test_a_fork_has_the_state_and_keeps_it(state: RecurrentState) -> None:
    write(state, 0, 7.0)
    state.fork(0, 2, 11)
    assert read(state, 2) == 7.0
    write(state, 2, 8.0)
    state.truncate(2, 11, 13)
    assert read(state, 2) == 7.0
    assert read(state, 0) == 7.0
    state.fork(1, 2, 0)
    assert state.kept(2, 5, 6) == 0


def test_without_room_for_copies_nothing_is_kept() -> None:
    shape = RecurrentShape(SHAPE.layers, 3, shared=0)
    assert sum(shape.sizes().values()) == 3 * SHAPE.nbytes
    with (
        Device.open("emulator") as device,
        device.create_stream() as stream,
        RecurrentState(device, shape, stream) as state,
    ):
        write(state, 0, 4.0)
        state.keep(0, 10)
        state.fork(0, 1, 12)
        assert read(state, 1) == 4.0
        assert [state.kept(1, length, 12) for length in (12, 11, 0)] == [12, 0, 0]
        state.truncate(1, 0, 12)
        with pytest.raises(ModelError, match="cannot be cut to 3 tokens"):
            state.truncate(0, 3, 10)
