"""The key/value caches: bookkeeping of places and pages, and what is copied on the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.stream import Stream
from urdir.model.engine.realizar import describe
from urdir.model.errors import ContextFullError, ModelError, SettingsError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.files.gguf import Gguf
from urdir.model.memory import kv_cache
from urdir.model.memory.cache_groups import Group, PagedGroup
from urdir.model.memory.cache_shape import CachedLayer, CacheShape
from urdir.model.memory.device_state import MAILBOX_SLOTS
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.session_settings import SessionSettings
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

PAGE = 16
#: Of the ring of layer 0: it has the next power of two above WINDOW - 1 + ROWS places.
WINDOW, ROWS, RING = 5, 20, 32


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    with Device.open(device_name) as opened:
        yield opened


def changed(config: Config, layer: int, **fields: Any) -> Config:
    """The same with other fields of a layer's attention."""
    layers = list(config.layers)
    before, after = layers[layer].blocks
    mixer = before.branches[0].network
    assert isinstance(mixer, Attention)
    block = Block((Branch(replace(mixer, **fields), before.branches[0].norm),))
    layers[layer] = LayerConfig((block, after))
    return replace(config, layers=tuple(layers))


def config_of(**fields: Any) -> Config:
    """Three layers, the first with a window (or ``fields``)."""
    config = describe(layers=3, hidden=64, heads=4, kv_heads=2, ffn=64, vocab=8, head_dim=16)
    return changed(config, 0, **(fields or {"window": WINDOW}))


def wide_config() -> Config:
    """Layers that keep all tokens."""
    return describe(layers=2, hidden=64, heads=2, kv_heads=2, ffn=64, vocab=8, head_dim=32)


def shape_of(
    config: Config, dtype: KvDtype = "f16", *, sequences: int = 2, **pages: int
) -> CacheShape:
    return CacheShape.of(config, SessionSettings(100, dtype, sequences=sequences, **pages), ROWS)


def test_the_description_names_operations_that_exist() -> None:
    words = re.findall(r"``(\w+)``", kv_cache.__doc__ or "")
    assert words
    for kind in (KvCache, Group, PagedGroup):
        assert [word for word in words if not callable(getattr(kind, word, None))] == []


# ---- shapes ----


def test_a_window_has_a_ring_and_its_group() -> None:
    shape = shape_of(config_of())
    assert [shape.layout(i).places for i in range(3)] == [RING, 256, 256]
    assert [list(group) for group in shape.groups] == [[0], [1, 2]]
    assert [shape.group_of(i) for i in range(3)] == [0, 1, 1]
    row = 2 * 2 * 16  # bytes of a token's keys
    sizes = shape.sizes()
    assert (sizes["keys.0"], sizes["values.0"]) == (2 * RING * row, 2 * RING * row)
    assert sizes["keys.2"] == 2 * 256 * row
    assert shape.read_nbytes(3) == 3 * 3 * 2 * row
    assert shape.read_nbytes(50) == (WINDOW + 2 * 50) * 2 * row


def test_a_window_that_saves_nothing_has_no_ring() -> None:
    shape = shape_of(config_of(window=250))
    assert shape.layout(0).capacity == 0
    assert [list(group) for group in shape.groups] == [[0, 1, 2]]


def test_a_window_has_pages_of_any_length() -> None:
    for page_len, pages in ((4 * RING, 2), (256, 1)):
        layout = shape_of(config_of(), page_len=page_len).layout(0)
        assert (layout.places, layout.blocks) == (256, 256 // page_len)
        assert layout.pages == 2 * pages


@pytest.mark.parametrize(("given", "pages"), [(4, 4), (15, 15), (24, 18 + 6), (100, 18 + 25)])
def test_windows_take_a_part_of_the_pages_that_are_given(given: int, pages: int) -> None:
    """Those of all sequences, the prompts of steps, and a quarter for prefixes."""
    shape = shape_of(config_of(), page_len=PAGE, pages=given)
    assert [shape.layout(layer).pages for layer in range(3)] == [pages, given, given]


def test_a_chunk_is_a_window_at_most_as_long() -> None:
    assert shape_of(config_of(chunk=WINDOW)).layers[0] == shape_of(config_of()).layers[0]


def test_a_layer_may_use_anothers_cache_or_none() -> None:
    config = changed(config_of(), 2, k=None, v=None, shares_cache_of=0)
    layers = list(config.layers)
    layers[1] = LayerConfig(layers[1].blocks[1:])
    shape = shape_of(replace(config, layers=tuple(layers)))
    assert shape.owners == (0, -1, 0)
    assert list(shape.layers) == [0]
    assert shape.layout(2) == shape.layout(0)
    assert shape.read_nbytes(1) == 2 * (2 * 2 * 2 * 16)


def test_pages_are_counted_for_each_group() -> None:
    shape = shape_of(config_of(), page_len=PAGE)
    held = WINDOW - 1 + MAILBOX_SLOTS + 3 * ROWS
    window = 2 + held // PAGE
    assert [shape.layout(i).pages for i in range(3)] == [2 * window, 2 * 16, 2 * 16]
    sizes = shape.sizes()
    assert (sizes["block table 0"], sizes["block table 1"]) == (4 * 2 * 16, 4 * 2 * 16)


def test_heads_of_values_may_be_others_than_of_keys() -> None:
    shape = shape_of(config_of(value_dim=8))
    sizes = shape.sizes()
    assert sizes["values.0"] * 2 == sizes["keys.0"]
    assert sizes["values.1"] == sizes["keys.1"]


# ---- what is stored ----


Array = npt.NDArray[Any]


class Model:
    """What every layer of a cache holds, in lists; values are f32 numbers by position."""

    def __init__(self, cache: KvCache, seed: int = 0) -> None:
        self.cache, self.rng = cache, np.random.default_rng(seed)
        sequences = range(cache.shape.sequences)
        self.tokens: dict[int, list[dict[str, Array]]] = {s: [] for s in sequences}

    def write(self, sequence: int, end: int) -> None:
        """Reserve up to ``end`` and write all new tokens of all layers."""
        start = len(self.tokens[sequence])
        self.cache.reserve(sequence, start, end)
        for position in range(start, end):
            token: dict[str, Array] = {}
            for layer in self.cache.shape.layers:
                for name, memory, layout in self._caches(layer):
                    value = self.rng.standard_normal((layout.kv_heads, 1, layout.head_dim))
                    stored = memory.download(layout.numpy_dtype, layout.shape)
                    token[name] = value.astype(np.float32)
                    layout.write(stored, sequence, [position], token[name], self._table(layer))
                    memory.upload(stored)
            self.tokens[sequence].append(token)

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    def fork(self, source: int, target: int) -> None:
        self.cache.fork(source, target, len(self.tokens[source]))
        self.tokens[target] = list(self.tokens[source])

    def begin(self, sequence: int, like: int, ids: Sequence[int], end: int) -> int:
        """A sequence begins with what another wrote for ``ids``; how many tokens it has."""
        found = self.cache.match(sequence, ids, end)
        self.tokens[sequence] = self.tokens[like][:found]
        return found

    def check(self) -> None:
        """Every layer still has what the next token of each sequence looks back on."""
        for sequence, tokens in self.tokens.items():
            for layer, cached in self.cache.shape.layers.items():
                first = max(0, len(tokens) + 1 - cached.span) if cached.span else 0
                positions = range(first, len(tokens))
                if not positions:
                    continue
                for name, memory, layout in self._caches(layer):
                    stored = memory.download(layout.numpy_dtype, layout.shape)
                    found = layout.read(stored, sequence, positions, self._table(layer))
                    wanted = np.concatenate([tokens[p][name] for p in positions], axis=1)
                    np.testing.assert_array_equal(found, wanted, err_msg=f"{name} of {sequence}")

    def _caches(self, layer: int) -> list[tuple[str, Any, Any]]:
        given, layout = self.cache.arguments(layer), self.cache.layout(layer)
        return [
            (f"keys {layer}", given["k_cache"], layout),
            (f"values {layer}", given["v_cache"], layout.values),
        ]

    def _table(self, layer: int) -> Array | None:
        layout = self.cache.layout(layer)
        if not layout.is_paged:
            return None
        shape = (layout.sequences, layout.blocks)
        return self.cache.arguments(layer)["block_table"].download(np.uint32, shape)


@pytest.mark.parametrize("page_len", [0, PAGE])
def test_rings_wrap_are_cut_and_forked(device: Device, page_len: int) -> None:
    """Steps of up to ROWS tokens, over and over: what is looked back on is there, in all layers."""
    shape = shape_of(config_of(value_dim=24), "f32", page_len=page_len)
    with device.create_stream() as stream, KvCache(device, shape, stream) as cache:
        model = Model(cache)
        for end in (3, 20, 40, 41):
            model.write(0, end)
            model.check()
        model.fork(0, 1)
        model.write(1, 60)  # overwrites all that it shared of the ring
        model.check()
        model.write(0, 43)
        model.check()
        model.truncate(0, 40)
        model.write(0, 45)
        model.check()
        model.fork(1, 0)
        model.truncate(1, 0)
        model.write(1, 17)
        model.write(0, 77)
        model.check()


def test_what_is_kept(device: Device) -> None:
    """Of a ring as much as it holds before the last token ever written; then all, or none."""
    with device.create_stream() as stream, KvCache(device, shape_of(config_of()), stream) as cache:
        cache.reserve(0, 0, RING)
        assert [cache.kept(0, n) for n in (0, 1, RING)] == [0, 1, RING]  # nothing is lost yet
        cache.reserve(0, RING, RING + 10)
        lowest = 10 + WINDOW - 1
        assert [cache.kept(0, n) for n in (lowest - 1, lowest, RING + 10)] == [
            0,
            lowest,
            RING + 10,
        ]
        assert cache.kept(1, 7) == 7
        with pytest.raises(ModelError, match="cannot be cut to 13 tokens: layers with a window"):
            cache.truncate(0, lowest - 1)
        cache.truncate(0, lowest + 1)  # the later ones have taken the places of others all the same
        assert cache.kept(0, lowest - 1) == 0
        cache.fork(0, 1, lowest + 1)
        assert (cache.kept(1, lowest), cache.kept(1, lowest - 1)) == (lowest, 0)
        cache.truncate(0, 0)
        assert cache.kept(0, 5) == 5
        with pytest.raises(ModelError, match="the cache has 2"):
            cache.kept(2, 0)


# ---- pages ----


def test_pages_that_the_window_passed_are_released(device: Device) -> None:
    """Except those that the tokens of steps in flight attend to."""
    shape = shape_of(config_of(), page_len=PAGE)
    with device.create_stream() as stream, KvCache(device, shape, stream) as cache:
        free = cache.pools[0].free
        for end in range(10, 100, 10):
            cache.reserve(0, end - 10, end)
        first = (80 - (WINDOW - 1) - MAILBOX_SLOTS) // PAGE
        assert len(cache.pages(0, 0)) == 6 - first == free - cache.pools[0].free
        assert len(cache.pages(0, 1)) == 6
        assert cache.pages(0, 1) == cache.pages(0, 2)
        lowest = first * PAGE + WINDOW - 1
        assert (cache.kept(0, lowest), cache.kept(0, lowest - 1)) == (lowest, 0)
        with pytest.raises(ModelError, match=f"cannot be cut to {lowest - 1} tokens"):
            cache.truncate(0, lowest - 1)
        cache.truncate(0, 80)
        assert (len(cache.pages(0, 0)), len(cache.pages(0, 1))) == (5 - first, 5)
        cache.truncate(0, 0)
        assert cache.pages(0, 0) == cache.pages(0, 1) == ()
        assert cache.pools[0].free == free


def test_a_fork_shares_pages_until_one_of_the_two_writes(device: Device) -> None:
    shape = shape_of(config_of(), page_len=PAGE)
    with device.create_stream() as stream, KvCache(device, shape, stream) as cache:
        cache.reserve(0, 0, 40)
        cache.fork(0, 1, 40)
        held = [cache.pages(0, layer) for layer in range(2)]
        for layer in (0, 1):
            assert cache.pages(1, layer) == held[layer]
        cache.reserve(1, 40, 41)
        for layer, left in ((0, 1), (1, 0)):  # the window has passed the first page of sequence 1
            whole, forked = cache.pages(0, layer), cache.pages(1, layer)
            assert whole[left:2] == forked[: 2 - left]
            assert whole[2] != forked[2 - left]
        cache.reserve(0, 40, 41)  # it has the last page for itself now
        assert [cache.pages(0, layer) for layer in range(2)] == [held[0][1:], held[1]]


def test_a_reserve_is_refused_whole(device: Device) -> None:
    """One group has room, another has not: neither takes a page."""
    shape = shape_of(config_of(), page_len=PAGE)
    layers = {i: replace(c, layout=replace(c.layout, pages=3)) for i, c in shape.layers.items()}
    for limited in ({0: layers[0]}, {1: layers[1], 2: layers[2]}):
        small = CacheShape({**shape.layers, **limited}, shape.owners, 2, shape.max_len)
        with device.create_stream() as stream, KvCache(device, small, stream) as cache:
            cache.reserve(0, 0, 20)
            before = [cache.pages(s, layer) for s in (0, 1) for layer in (0, 1)]
            kept, free = cache.kept(1, 5), cache.free_tokens
            with pytest.raises(ContextFullError, match="2 pages of 16 tokens are needed, 1 of 3"):
                cache.reserve(1, 0, 20)
            assert [cache.pages(s, layer) for s in (0, 1) for layer in (0, 1)] == before
            assert (cache.kept(1, 5), cache.free_tokens) == (kept, free) == (5, PAGE)
            cache.reserve(1, 0, PAGE)
            assert cache.free_tokens == 0
            with pytest.raises(ContextFullError, match="exceed the cache's 256"):
                cache.reserve(1, 16, 257)


# ---- beginnings that others have computed ----


def test_a_beginning_is_shared_in_all_layers(device: Device, stream: Stream) -> None:
    shape = shape_of(wide_config(), "f32", sequences=3, page_len=PAGE)
    with KvCache(device, shape, stream) as cache:
        model = Model(cache)
        model.write(0, 40)
        cache.publish(0, range(40))
        assert model.begin(1, 0, range(39), 41) == 39
        assert cache.pages(1)[:2] == cache.pages(0)[:2]
        assert cache.pages(1)[2] != cache.pages(0)[2]  # filled in part: a copy
        model.check()
        model.write(1, 45)
        model.write(0, 44)
        model.check()
        model.truncate(0, 0)
        assert model.begin(0, 1, [*range(36), 99, 99], 50) == 36
        assert model.begin(2, 1, [*range(18), 99], 20) == PAGE  # two tokens are worth no copy
        model.write(2, 30)
        model.check()
        pool = cache.pools[0]
        assert (pool.queries, pool.hits) == (39 + 38 + 19, 39 + 36 + 16)


def test_what_is_written_anew_is_not_known_any_more(device: Device, stream: Stream) -> None:
    shape = shape_of(wide_config(), sequences=3, page_len=PAGE)
    with KvCache(device, shape, stream) as cache:
        cache.reserve(0, 0, 60)
        cache.publish(0, range(60))
        cache.fork(0, 1, 60)
        cache.truncate(0, 20)
        cache.reserve(0, 20, 30)  # into a copy: the fork has the page, too
        assert cache.match(2, range(60), 60) == 60
        for sequence in (1, 2):
            cache.truncate(sequence, 20)
        cache.truncate(2, 0)
        cache.reserve(1, 20, 30)  # in place
        assert cache.match(2, range(60), 60) == PAGE


def test_contiguous_caches_share_no_beginnings(device: Device, stream: Stream) -> None:
    with KvCache(device, shape_of(config_of()), stream) as cache:
        assert cache.match(0, range(20), 30, 16) == cache.share_len == 0
        cache.publish(0, range(20))
        assert cache.match(1, range(20), 30, 16) == 0
        assert cache.pages(1, 0) == cache.pools == ()
        assert cache.reserve(0, 30, 31) == 31
        assert cache.most_tokens == 256
        with pytest.raises(ModelError, match="sequence 1 holds tokens: truncate it to 0 first"):
            cache.match(1, (), 1, 0)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_beginning_is_shared_with_its_window(device: Device, stream: Stream, layers: int) -> None:
    """Of layers with windows alone, too. A prompt parts in a page, at its end, or where the window
    of the first one has passed: the pages are kept until others need them."""
    config = config_of()
    shape = shape_of(replace(config, layers=config.layers[:layers]), "f32", page_len=PAGE)
    ids = tuple(range(90))
    with KvCache(device, shape, stream) as cache:
        model, (window, *_) = Model(cache), cache.pools
        assert (model.begin(0, 0, ids[:49], 50), cache.share_len) == (0, PAGE)
        for end in (20, 40, 50):
            model.write(0, end)
            cache.publish(0, ids[:end])
        for end in range(51, 90):
            model.write(0, end)
        assert len(cache.pages(0, 0)) == 2
        for at in (50, 48, 47, 30):
            found = at if at % PAGE >= PAGE / 4 else 48
            assert model.begin(1, 0, [*ids[:at], 99, 99], at + 2) == found
            model.check()
            model.write(1, at + 3)
            model.check()
            model.truncate(1, 0)
        cache.publish(0, ids[:89])
        cache.truncate(0, 0)
        assert window.kept == 6
        window.release(window.take(window.pages - 5))  # the first page goes: no end lies behind it
        for at, found in ((10, 0), (30, 30), (90, 89)):
            assert cache.match(1, ids[:at], 90) == found
            cache.truncate(1, 0)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("host_nbytes", [0, 1 << 20])
def test_the_last_free_page_is_that_of_the_prefix(
    device: Device, stream: Stream, layers: int, host_nbytes: int
) -> None:
    """A prefix ends in a page that is evicted for the sequence that begins with it: its contents
    stay there, or are copied, in layers with windows, too."""
    config, ids = config_of(), tuple(range(90))
    layers_of = replace(config, layers=config.layers[:layers])
    shape = shape_of(layers_of, "f32", page_len=PAGE, pages=7)
    with KvCache(device, shape, stream, host_nbytes=host_nbytes) as cache:
        model = Model(cache)
        model.write(0, 3 * PAGE - 3)
        cache.publish(0, ids[: 3 * PAGE - 3])
        cache.truncate(0, 0)
        pool, at = cache.pools[-1], 3 * PAGE - 6
        pool.take(pool.free - pool.kept)
        tokens, model.tokens[0] = model.tokens[0], []
        assert cache.match(1, (*ids[:at], 99), at + 1) == at
        assert pool.free == 0
        model.tokens[1] = tokens[:at]
        model.check()


def test_a_window_without_room_is_refused_whole(device: Device, stream: Stream) -> None:
    shape = shape_of(config_of(), page_len=PAGE)
    few = replace(shape.layers[0], layout=replace(shape.layers[0].layout, pages=3))
    shape = replace(shape, layers={**shape.layers, 0: few})
    with KvCache(device, shape, stream) as cache:
        assert cache.most_tokens == 3 * PAGE
        cache.reserve(0, 0, 20)
        free = cache.pools[1].free
        with pytest.raises(ContextFullError, match="2 pages of 16 tokens are needed, 1 of 3"):
            cache.match(1, range(40), 41)
        assert (cache.pages(1, 0), cache.pages(1, 1), cache.pools[1].free) == ((), (), free)
        cache.match(1, range(15), 16)


def test_a_beginning_is_refused_whole(device: Device, stream: Stream) -> None:
    shape = shape_of(wide_config(), page_len=PAGE, pages=5)
    with KvCache(device, shape, stream) as cache:
        assert (cache.most_tokens, cache.share_len) == (5 * PAGE, PAGE)
        cache.reserve(0, 0, 40)
        cache.publish(0, range(40))
        with pytest.raises(ContextFullError, match="3 pages of 16 tokens are needed, 2 of 5"):
            cache.match(1, range(32), 33, spare=17)
        assert (cache.pages(1), cache.free_tokens) == ((), 2 * PAGE)
        with pytest.raises(ModelError, match="5 tokens to look up, but 4"):
            cache.match(1, range(5), 4)
        assert cache.match(1, range(32), 33, spare=PAGE) == 32
        assert cache.free_tokens == PAGE


@pytest.mark.parametrize(
    ("call", "nth"),
    [*(("cuMemcpyDtoDAsync", n) for n in (1, 2, 7)), *(("cuMemcpyHtoDAsync", n) for n in (1, 2))],
)
def test_no_page_is_lost_where_a_copy_fails(emulator: Device, call: str, nth: int) -> None:
    """Neither of a page, which is shared or filled in part, nor of the table."""
    shape = shape_of(wide_config(), "f32", sequences=3, page_len=PAGE, pages=9)
    with emulator.create_stream() as stream, KvCache(emulator, shape, stream) as cache:
        model = Model(cache)
        model.write(0, 40)
        cache.publish(0, range(40))
        cache.fork(0, 2, 40)
        held, free = [cache.pages(s) for s in range(3)], cache.free_tokens

        def begin_and_grow() -> None:
            cache.match(1, range(39), 45)
            cache.truncate(1, 0)
            cache.reserve(2, 40, 42)

        emulator.api.inject(call, nth)
        with pytest.raises(CudaError, match=call.removesuffix("Async")):
            begin_and_grow()
        assert cache.pages(1) == ()
        assert cache.pages(0) == held[0]
        assert len(cache.pages(2)) == len(held[2])
        cache.truncate(2, 0)
        cache.truncate(0, 0)
        assert cache.free_tokens == 9 * PAGE > free
        assert cache.match(1, range(39), 41) == 39


def test_one_shape_for_all_layers() -> None:
    layout = shape_of(config_of()).layout(1)
    shape = CacheShape.equal(layout, 2)
    assert shape.layers == {0: CachedLayer(layout, 0), 1: CachedLayer(layout, 0)}
    assert (shape.owners, shape.sequences, shape.max_len) == ((0, 1), 2, 256)


def test_values_that_keys_hold_take_no_room(emulator: Device) -> None:
    """One array a layer, which a fork copies."""
    layout = KvLayout(2, 1, 256, 72, "f16", value_dim=48, values_in_keys=True)
    keys = np.random.default_rng(1).standard_normal(layout.shape).astype(np.float16)
    with (
        emulator.create_stream() as stream,
        KvCache(emulator, CacheShape.equal(layout, 2), stream) as cache,
    ):
        assert cache.nbytes == 2 * layout.nbytes
        assert [*cache.arguments(1)] == ["k_cache"]
        cache.arguments(1)["k_cache"].upload(keys)
        cache.reserve(0, 0, 5)
        cache.fork(0, 1, 5)
        stream.synchronize()
        copied = cache.arguments(1)["k_cache"].download(np.float16, layout.shape)
    np.testing.assert_array_equal(copied, keys[[0, 0]])


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "fp8"])
def test_a_latent_token_is_stored_once(
    reference_file: Callable[[str], Path], dtype: KvDtype
) -> None:
    with Gguf(reference_file("deepseek2-moe")) as gguf:
        config = Config.of(gguf)
    shape = CacheShape.of(config, SessionSettings(64, dtype, page_len=16), rows=8)
    assert (
        shape.read_nbytes(1)
        == config.n_layers
        * {
            "f16": 2 * 576,
            "q8_0": 576 + 36,
            "fp8": 576 + 4,
        }[dtype]
    )


def test_keys_and_values_have_types_of_their_own(reference_file: Callable[[str], Path]) -> None:
    settings = SessionSettings(64, "fp8", value_dtype="q4_0", page_len=16)
    with Gguf(reference_file("llama4-moe")) as gguf:
        config = Config.of(gguf)
    heads = [a for layer in config.layers if (a := layer.attention) is not None]
    wanted = sum(a.kv_heads * (a.key_dim + 4 + a.value_dim * 18 // 32) for a in heads)
    assert CacheShape.of(config, settings, rows=8).read_nbytes(1) == wanted
    with Gguf(reference_file("deepseek2-moe")) as gguf:
        config = Config.of(gguf)
    with pytest.raises(SettingsError, match="part of its keys"):
        CacheShape.of(config, settings, rows=8)


def test_heads_without_whole_groups_are_refused(reference_file: Callable[[str], Path]) -> None:
    with Gguf(reference_file("laguna-moe")) as gguf:
        config = Config.of(gguf)
    with pytest.raises(
        SettingsError, match="value_dtype q4_0: its groups have 32 values, heads have 80"
    ):
        CacheShape.of(config, SessionSettings(64, "fp8", value_dtype="q4_0"), rows=8)
