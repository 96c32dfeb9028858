"""What is left by sequences of one scope: others neither find it nor meet its traces."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.model.memory.test_kv_cache import PAGE, shape_of, wide_config
from tests.model.memory.test_storage import ONE, Opened
from urdir.driver.device import Device
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.recurrent_state import RecurrentShape

TOKENS = range(3 * PAGE)


def test_pages_are_found_in_their_scope_on_every_rank(emulator: Device) -> None:
    """In a first page, in whole ones, and in part of one."""
    shape = shape_of(wide_config(), page_len=PAGE)
    with (
        emulator.create_stream() as stream,
        KvCache(emulator, shape, stream) as other,
        KvCache(emulator, shape, stream, [other]) as cache,
    ):
        for scope in (b"a", b"b", b""):
            assert cache.match(0, TOKENS, 3 * PAGE, scope=scope) == 0
            cache.publish(0, TOKENS, scope)
            cache.truncate(0, 0)
            for length in (3 * PAGE, 3 * PAGE - 4, PAGE // 2):
                assert cache.match(1, TOKENS[:length], 3 * PAGE, scope=scope) == length
                assert other.pages(1) == cache.pages(1)
                cache.truncate(1, 0)
            for each in (cache, other):
                assert each.known(TOKENS, scope) == 3 * PAGE
                assert each.known(TOKENS, b"c") == 0
        assert (cache.pools[0].kept, other.pools[0].kept) == (9, 9)


def test_a_place_that_is_released_goes_on_in_its_scope_alone(emulator: Device) -> None:
    with ExitStack() as owners:
        stream = owners.enter_context(emulator.create_stream())
        storage = Opened(owners, stream, wide_config()).storage
        for scope, found in ((b"a", 0), (b"a", 20), (b"b", 0), (b"a", 0), (b"", 0), (b"", 20)):
            assert storage.match(0, TOKENS[:20], 30, scope=scope) == found
            storage.release(0, TOKENS[:20], 20, scope)


def test_states_are_found_and_prompts_cut_in_their_scope_alone(
    emulator: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps end, which takes time, says nothing of what others asked."""
    monkeypatch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
    states = RecurrentShape(ONE.layers, 2, shared=3)
    own = [*TOKENS[: 2 * PAGE], *[99] * (2 * PAGE)]  # parts from the tokens after two pages
    with ExitStack() as owners:
        stream = owners.enter_context(emulator.create_stream())
        storage = Opened(owners, stream, wide_config(), states, page_len=PAGE).storage
        assert storage.match(0, TOKENS, 3 * PAGE, scope=b"a") == 0
        storage.keep_prefix(0, 3 * PAGE)
        storage.release(0, TOKENS, 3 * PAGE, b"a")
        for scope, cut in ((b"a", 2 * PAGE), (b"b", 4 * PAGE), (b"", 4 * PAGE)):
            assert storage.match(0, own, 5 * PAGE, scope=scope) == 0
            assert storage.cut(0, 0, 5 * PAGE) == storage.next_shared(0, 0) == cut
            storage.release(0, (), 0, scope)
            found = storage.match(1, [*TOKENS, 7], 4 * PAGE, scope=scope)
            assert found == (3 * PAGE if scope == b"a" else 0)
            storage.release(1, (), 0, scope)
