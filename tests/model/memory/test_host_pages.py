"""Pages that leave the device for host memory, and come back with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.model.memory.test_kv_cache import PAGE, Model, config_of, shape_of, wide_config
from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.stream import Stream
from urdir.model.errors import ModelError
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.host_pages import HostPages, _runs
from urdir.model.memory.host_slots import Move
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.pages import PagePool
from urdir.model.memory.prefix_tree import Node
from urdir.model.memory.recurrent_state import RecurrentShape, RecurrentState
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

IDS = tuple(range(90))


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    with Device.open(device_name) as opened:
        yield opened


def evict(cache: KvCache) -> None:
    """Others need all pages for a while."""
    assert cache.prefixes is not None
    cache.prefixes.evict()


def host_of(cache: KvCache) -> HostPages[Node]:
    assert cache.prefixes is not None
    assert cache.prefixes.host is not None
    return cache.prefixes.host


def slots(cache: KvCache) -> int:
    return host_of(cache).used


@pytest.mark.parametrize("layers", [1, 3])
def test_pages_come_back_with_their_windows(device: Device, stream: Stream, layers: int) -> None:
    """Of layers with windows alone, and beside others; a prompt that parts in a page has a copy of
    what came back."""
    config = config_of()
    shape = shape_of(replace(config, layers=config.layers[:layers]), "f32", page_len=PAGE)
    with KvCache(device, shape, stream, host_nbytes=1 << 20) as cache:
        model = Model(cache)
        model.write(0, 60)
        cache.publish(0, IDS[:60])
        cache.truncate(0, 0)
        tokens, model.tokens[0] = model.tokens[0], []
        evict(cache)
        assert slots(cache) == 4
        for at, left in ((44, 1), (60, 0)):
            assert cache.match(1, (*IDS[:at], 99), at + 1) == at
            assert slots(cache) == left
            model.tokens[1] = tokens[:at]
            model.check()
            cache.truncate(1, 0)
        evict(cache)
        assert slots(cache) == 4
        assert cache.match(0, IDS[:60], 61) == 60


#: Types with scales, and latent vectors, which hold the values.
LAYOUTS = (
    KvLayout(2, 1, 256, 64, "q8_0", PAGE, 9),
    KvLayout(2, 1, 256, 64, "q4_0", PAGE, 9),
    KvLayout(2, 1, 256, 72, "f16", PAGE, 9, value_dim=48, values_in_keys=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["q8_0", "q4_0", "latent"])
def test_the_same_bytes_come_back(device: Device, stream: Stream, layout: KvLayout) -> None:
    rng, shape = np.random.default_rng(1), CacheShape.equal(layout, 2)
    with KvCache(device, shape, stream, host_nbytes=1 << 20) as cache:
        cache.reserve(0, 0, 60)
        pages, planes = cache.pages(0), list(cache._groups[0].planes())
        sizes = [nbytes for _, _, nbytes in planes]
        contents = [rng.integers(0, 256, (len(pages), size), np.uint8) for size in sizes]
        for (memory, start, nbytes), rows in zip(planes, contents, strict=True):
            for page, row in zip(pages, rows, strict=True):
                memory.upload(row, start + page * nbytes)
        cache.publish(0, IDS[:60])
        cache.truncate(0, 0)
        evict(cache)
        for memory, start, nbytes in planes:
            memory.slice(start, layout.pages * nbytes).fill(0)
        assert cache.match(1, IDS[:60], 60) == 60
        stream.synchronize()
        for (memory, start, nbytes), rows in zip(planes, contents, strict=True):
            for page, row in zip(cache.pages(1), rows, strict=True):
                found = memory.slice(start + page * nbytes, nbytes).download(np.uint8, nbytes)
                np.testing.assert_array_equal(found, row)


def test_the_oldest_leave_the_host(device: Device, stream: Stream) -> None:
    """Two prompts, room for one: of that which was evicted first the beginning is left. A page that
    is computed again leaves its slot."""
    shape = shape_of(wide_config(), "f32", page_len=PAGE)
    with KvCache(device, shape, stream) as cache:
        planes = sum(nbytes for _, _, nbytes in cache._groups[0].planes())
    with KvCache(device, shape, stream, host_nbytes=5 * planes) as cache:
        pool = cache.pools[0]
        assert isinstance(pool, PagePool)
        for first in (0, 100):
            tokens = range(first, first + 3 * PAGE)
            cache.match(0, tokens, 3 * PAGE)
            cache.publish(0, tokens)
            cache.truncate(0, 0)
        evict(cache)
        assert slots(cache) == 5
        assert [cache.known(range(first, first + 99)) for first in (0, 100)] == [32, 48]
        cache.reserve(0, 0, 2 * PAGE)
        cache.publish(0, range(2 * PAGE))
        assert slots(cache) == 3
        assert cache.match(1, range(2 * PAGE), 2 * PAGE) == 2 * PAGE
        assert cache.pages(1) == cache.pages(0)


@pytest.mark.parametrize("layers", [(slice(0, 1), slice(1, 3)), (slice(1, 3), slice(0, 1))])
def test_ranks_with_other_layers_find_as_much(
    device: Device, stream: Stream, layers: tuple[slice, slice]
) -> None:
    """One layer has room for more pages on the host than two; a window may have passed."""
    config = config_of()
    shapes = [
        shape_of(replace(config, layers=config.layers[part]), "f32", page_len=PAGE)
        for part in layers
    ]
    with (
        KvCache(device, shapes[1], stream, host_nbytes=24 << 10) as follower,
        KvCache(device, shapes[0], stream, [follower], host_nbytes=24 << 10) as cache,
    ):
        assert host_of(cache).count != host_of(follower).count
        model, other = Model(cache), Model(follower)
        cache.reserve(0, 0, 60)
        other.write(0, 60)
        model.write(0, 60)
        cache.publish(0, IDS[:60])
        cache.truncate(0, 0)
        tokens = [of.tokens.pop(0) for of in (model, other)]
        for each in (cache, follower):
            evict(each)
        found = cache.match(1, IDS[:60], 61)
        assert 0 < found < 60
        for of, held in zip((model, other), tokens, strict=True):
            of.tokens = {1: held[:found]}
            of.check()


def test_host_memory_for_less_than_a_page_is_refused(device: Device, stream: Stream) -> None:
    shape = shape_of(wide_config(), page_len=PAGE)
    with pytest.raises(ModelError, match="prefix_host_memory has 1,000 bytes for a device: a page"):
        KvCache(device, shape, stream, host_nbytes=1000)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamWaitEvent"])
@pytest.mark.parametrize("nth", [1, 3])
def test_no_page_or_slot_is_lost_where_a_copy_fails(emulator: Device, call: str, nth: int) -> None:
    """What was not copied is not found."""
    shape = shape_of(config_of(), "f32", page_len=PAGE)
    with (
        emulator.create_stream() as stream,
        KvCache(emulator, shape, stream, host_nbytes=1 << 20) as cache,
    ):
        cache.reserve(0, 0, 60)
        cache.publish(0, IDS[:60])
        cache.truncate(0, 0)
        if call == "cuMemcpyHtoDAsync":
            evict(cache)

        def go_there_and_back() -> None:
            for _ in range(2):
                evict(cache)
                cache.match(1, IDS[:60], 61)
                cache.truncate(1, 0)

        emulator.api.inject(call, nth)
        with pytest.raises(CudaError):
            go_there_and_back()
        cache.truncate(1, 0)
        assert all(pool.free == pool.pages for pool in cache.pools)
        host = host_of(cache)
        assert len(host._unused) + host.used == host.count
        found = cache.match(1, IDS[:60], 61)
        assert found == 0 or call == "cuStreamWaitEvent"


def test_pages_come_back_only_where_that_is_faster(device: Device, stream: Stream) -> None:
    """What is on the device is found anyway; what was computed once more is."""
    shape = shape_of(config_of(), "f32", page_len=PAGE)
    with KvCache(device, shape, stream, host_nbytes=1 << 20) as cache:
        cache.reserve(0, 0, 60)
        cache.publish(0, IDS[:60])
        cache.truncate(0, 0)
        evict(cache)
        prefixes = cache.prefixes
        assert prefixes is not None
        prefixes._copy_seconds = 1e-3
        for _ in range(30):
            prefixes.learn(300, 0.15)
        prefixes.learn(10, 9.0)  # few tokens count for nothing
        assert cache.match(1, IDS[:60], 61) == 0
        cache.reserve(1, 0, 20)
        cache.publish(1, IDS[:PAGE])
        assert cache.match(0, IDS[:60], 61) == PAGE
        cache.truncate(0, 0)
        for _ in range(30):
            prefixes.learn(300, 0.6)
        assert cache.match(0, IDS[:60], 61) == 60


def test_the_rate_is_measured(device: Device, stream: Stream) -> None:
    shape = shape_of(config_of(), page_len=PAGE)
    with KvCache(device, shape, stream, host_nbytes=1 << 20) as cache:
        assert cache.prefixes is not None
        cache.prefixes.measure()
        assert 0 < cache.prefixes._copy_seconds < 60


def test_neighbours_are_copied_at_once() -> None:
    pairs = [(7, 4), (3, 9), (5, 2), (6, 3), (4, 8), (8, 6)]
    assert _runs(pairs) == [(3, 9, 1), (4, 8, 1), (5, 2, 3), (8, 6, 1)]
    assert _runs([(page, 40 + page) for page in range(9, -1, -1)]) == [(0, 40, 10)]
    assert _runs([]) == []


def test_states_come_back(device: Device, stream: Stream) -> None:
    shape = RecurrentShape({0: {"a": 16, "b": 4}, 2: {"a": 16}}, 1, shared=2)
    with (
        RecurrentState(device, shape, stream) as states,
        HostPages[int](device, stream, [states], 100) as host,
    ):
        assert host.count == 2
        rng = np.random.default_rng(0)
        arrays = [rng.integers(0, 256, size, np.uint8) for size in (16, 4, 16)]
        states.write(1, arrays)
        slot, _ = host.put(7) or (-1, None)
        host.receive([Move(7, slot, (1,))])
        states.write(1, [np.zeros_like(array) for array in arrays])
        host.give([Move(7, host.claim(7), (0,))])
        stream.synchronize()
        for found, wanted in zip(states.read(0), arrays, strict=True):
            np.testing.assert_array_equal(found, wanted)
