"""What is left in a place of a sequence: how much of it the next one goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.model.memory.test_kv_cache import PAGE, RING, WINDOW, config_of, shape_of, wide_config
from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.driver.stream import Stream
from urdir.model.errors import ModelError, PrefixFileError
from urdir.model.families.config import Config
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.prefix_copy import PrefixBytes
from urdir.model.memory.recurrent_state import RecurrentShape, RecurrentState
from urdir.model.memory.storage import SequenceStorage

NONE = RecurrentShape({}, 2)
ONE = RecurrentShape({0: {"state": 16}}, 2)


@pytest.fixture
def device() -> Iterator[Device]:
    with Device.open("emulator") as opened:
        yield opened


class Opened:
    """A storage of two sequences, with its parts."""

    def __init__(
        self,
        owners: ExitStack,
        stream: Stream,
        config: Config,
        states: RecurrentShape = NONE,
        page_len: int = 0,
    ) -> None:
        shape, device = shape_of(config, page_len=page_len), stream.device
        self.cache = owners.enter_context(KvCache(device, shape, stream))
        self.states = owners.enter_context(RecurrentState(device, states, stream))
        self.storage = SequenceStorage(self.cache, self.states)

    def state(self) -> float:
        """What the state of sequence 0 is."""
        return float(self.states.arguments(0)["state"].download(np.float32, 1)[0])

    def write_state(self, value: float) -> None:
        self.states.arguments(0)["state"].upload(np.full(4, value, np.float32))


@pytest.fixture
def owners() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_place_goes_on_from_what_it_was_left_with(stream: Stream, owners: ExitStack) -> None:
    storage = Opened(owners, stream, wide_config()).storage
    assert storage.match(0, range(20), 30) == 0
    assert storage.reserve(0, 30, 40) == 40
    storage.release(0, range(35), 38)
    assert storage.match(1, range(35), 36) == 0  # a place of its own
    assert storage.match(0, [*range(25), 90, 91], 28) == 25
    storage.release(0, [*range(25), 90], 26)
    assert storage.match(0, [*range(25), 90, 91], 28) == 26
    storage.release(0, (), 26)  # nothing of it may be shared
    assert storage.match(0, range(25), 26) == 0


def test_a_ring_that_has_lost_the_beginning_is_begun_anew(
    stream: Stream, owners: ExitStack
) -> None:
    storage = Opened(owners, stream, config_of()).storage
    oldest = RING + 20 - (RING - WINDOW) - 1  # of the lengths that the ring serves
    for shared, found in ((oldest, oldest), (oldest - 1, 0)):
        storage.match(0, (), RING + 20)
        storage.release(0, range(RING + 20), RING + 20)
        assert storage.match(0, [*range(shared), 90, 91], shared + 2) == found
        storage.release(0, (), 0)


def test_pages_are_given_back(stream: Stream, owners: ExitStack) -> None:
    """Those that are shared are found, by any sequence."""
    opened = Opened(owners, stream, wide_config(), page_len=PAGE)
    storage, (pool,) = opened.storage, opened.cache.pools
    storage.match(0, (), 20)
    storage.release(0, range(20), 20)
    assert pool.used == 0
    assert storage.match(1, range(20), 21) == 20


def test_states_go_back_to_the_end_of_a_prompt(stream: Stream, owners: ExitStack) -> None:
    """Or stay, where the answer goes on; where steps ran ahead, they are not those of any length
    that is known."""
    opened = Opened(owners, stream, wide_config(), ONE)
    storage = opened.storage
    for reached, shared, found, state in (
        (12, 12, 12, 6.0),  # all of it
        (14, 12, 8, 5.0),  # two steps were not read
        (12, 10, 8, 5.0),
        (12, 7, 0, 6.0),  # which nobody reads
    ):
        storage.match(0, (), 8)
        opened.write_state(5.0)
        storage.keep_prefix(0, 8)
        storage.reserve(0, 8, reached)
        opened.write_state(6.0)
        storage.release(0, range(12), reached)
        assert storage.match(0, [*range(shared), 90, 91], 14) == found
        assert opened.state() == state
        storage.release(0, (), 14)


def test_a_state_that_was_left_is_not_one_of_the_next(stream: Stream, owners: ExitStack) -> None:
    opened = Opened(owners, stream, wide_config(), ONE)
    storage = opened.storage
    storage.match(0, (), 8)
    storage.keep_prefix(0, 8)
    storage.release(0, range(12), 12)
    assert storage.match(0, (), 20) == 0
    assert storage.kept(0, 10, 20) == 0
    with pytest.raises(ModelError, match="cannot be cut to 8 tokens"):
        storage.truncate(0, 8, 20)


def shared(owners: ExitStack, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Two places for states, which are kept where they save a page."""
    monkeypatch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
    states = RecurrentShape(ONE.layers, 2, shared=2)
    return Opened(owners, stream, wide_config(), states, page_len=PAGE)


def test_a_prefix_that_is_written_has_its_state_at_the_end_of_a_page(
    stream: Stream, owners: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may say anything; no place of a state is lost where it cannot be written."""
    opened = shared(owners, stream, monkeypatch)
    storage, known = opened.storage, opened.storage.shared_states
    assert known is not None

    def prefix(count: int) -> PrefixBytes:
        arrays = [np.zeros(shape, np.uint8) for shape in storage.prefix_shapes(count)]
        return PrefixBytes(tuple(range(count)), arrays)

    with pytest.raises(PrefixFileError, match="a state 3 tokens after a page"):
        storage.write_prefix(0, prefix(PAGE + 3), b"")
    assert (storage.ended(0)[1], storage.match(1, range(PAGE + 3), PAGE + 3)) == ((), 0)
    storage.release(1, (), 0)
    pages = len([*opened.cache.prefixes.shapes(PAGE)]) if opened.cache.prefixes else 0
    stream.device.api.inject("cuMemcpyHtoD", pages + 1)
    with pytest.raises(DriverError):
        storage.write_prefix(0, prefix(PAGE), b"")
    assert (known.known, len(known._unused)) == (0, known.places)
    storage.write_prefix(0, prefix(2 * PAGE), b"")
    assert storage.match(1, range(2 * PAGE + 1), 3 * PAGE) == 2 * PAGE


def test_a_sequence_begins_with_pages_and_the_state_of_another(
    stream: Stream, owners: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both are there, and the step that gives them is complete."""
    opened, tokens = shared(owners, stream, monkeypatch), range(3 * PAGE)
    storage, (pool,) = opened.storage, opened.cache.pools
    assert storage.match(1, tokens[:-1], 3 * PAGE) == 0
    assert storage.cut(1, 0, 3 * PAGE) == storage.cut(1, 0, 2 * PAGE) == 2 * PAGE
    assert (storage.cut(1, 0, PAGE), storage.cut(1, 2 * PAGE, 3 * PAGE)) == (PAGE, 3 * PAGE)
    assert (storage.next_shared(1, PAGE), storage.next_shared(1, 2 * PAGE)) == (2 * PAGE, 0)
    opened.states.arguments(0)["state"].upload(np.full(8, 5, np.float32))
    for length in (PAGE, 2 * PAGE, 3 * PAGE):
        storage.keep_prefix(1, length)
    opened.write_state(7.0)
    assert storage.match(0, tokens, 4 * PAGE) == 0  # its step is not complete
    storage.release(0, (), 0)
    storage.publish(1, tokens)
    assert pool.known(tokens) == 2 * PAGE  # pages without a state help nobody
    assert storage.match(0, [*tokens[: 3 * PAGE - 1], 99], 4 * PAGE) == 2 * PAGE
    assert opened.state() == 5.0
    storage.release(0, tokens, 3 * PAGE)
    storage.release(1, tokens, 3 * PAGE)
    assert (pool.used, pool.kept) == (0, 2)
    states = storage.shared_states
    assert states is not None
    assert (states.known, states.places) == (1, 2)


def test_states_of_steps_that_fail_are_nobody_s(
    stream: Stream, owners: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, tokens = shared(owners, stream, monkeypatch), range(PAGE + 1)
    storage, states = opened.storage, opened.storage.shared_states
    assert states is not None
    for _ in range(3):
        storage.match(0, tokens, PAGE + 2)
        storage.keep_prefix(0, PAGE)
        storage.release(0, (), PAGE)
    assert states.known == 0
    opened.write_state(1.0)
    storage.match(0, tokens, PAGE + 2)
    copy = opened.states._copy

    def failing(*args: object) -> None:
        raise DriverError("no such luck")

    monkeypatch.setattr(opened.states, "_copy", failing)
    with pytest.raises(DriverError, match="no such luck"):
        storage.keep_prefix(0, PAGE)
    monkeypatch.setattr(opened.states, "_copy", copy)
    storage.keep_prefix(0, PAGE)
    storage.publish(0, tokens)
    monkeypatch.setattr(opened.states, "_copy", failing)
    with pytest.raises(DriverError, match="no such luck"):
        storage.match(1, tokens, PAGE + 2)
    monkeypatch.setattr(opened.states, "_copy", copy)
    assert storage.match(1, tokens, PAGE + 2) == PAGE


def test_pages_are_no_beginning_where_each_sequence_keeps_its_state(
    stream: Stream, owners: ExitStack
) -> None:
    opened = Opened(owners, stream, wide_config(), ONE, page_len=PAGE)
    storage = opened.storage
    storage.match(0, range(20), 20)
    assert (storage.cut(0, 0, 20), storage.next_shared(0, 0)) == (20, 0)
    storage.keep_prefix(0, 20)
    storage.release(0, range(20), 20)
    assert storage.match(1, range(20), 21) == 0
    assert storage.shared_states is None


def test_beside_a_ring_no_state_is_shared(stream: Stream, owners: ExitStack) -> None:
    """There are no pages."""
    states = RecurrentShape(ONE.layers, 2, shared=2)
    storage = Opened(owners, stream, config_of(), states).storage
    for sequence in range(2):
        assert storage.match(sequence, range(90), 91) == 0
        assert (storage.cut(sequence, 0, 91), storage.next_shared(sequence, 0)) == (91, 0)
        storage.keep_prefix(sequence, 91)
        storage.publish(sequence, range(90))
        storage.release(sequence, range(90), 92)
    assert storage.shared_states is not None
    assert storage.shared_states.places == 0


def test_a_state_is_found_where_a_window_is(
    stream: Stream, owners: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state whose window has lost its pages is not used, but one before it."""
    monkeypatch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
    states = RecurrentShape(ONE.layers, 2, shared=2)
    opened = Opened(owners, stream, config_of(), states, page_len=PAGE)
    storage, (window, _) = opened.storage, opened.cache.pools
    for length in (2 * PAGE, 4 * PAGE):
        tokens = range(length + 1)
        found = storage.match(0, tokens, length + 2)
        for end in range(found + PAGE, length + 1, PAGE):
            storage.reserve(0, end - PAGE, end)
            storage.keep_prefix(0, end)
            storage.publish(0, tokens[:end])
        storage.release(0, tokens[:length], length)
    assert window.kept == 4
    assert storage.match(1, range(70), 71) == 4 * PAGE
    storage.release(1, (), 71)
    prefixes = opened.cache.prefixes
    assert prefixes is not None
    last = prefixes.leading.pool.find(range(4 * PAGE)).nodes[-1]
    prefixes.windows[0].pool.detach(last)
    assert storage.match(1, range(70), 71) == 2 * PAGE
