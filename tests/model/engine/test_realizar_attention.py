"""Realizar's attention operations on buffers of the test's own, against numpy in float64."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver import bindings
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LaunchError, OutOfMemoryError
from urdir.driver.memory import Arena, Region
from urdir.model.engine.realizar import (
    CachedAttention,
    flash_attention_multi_head,
    flash_decoding_graphed,
    incremental_attention_async,
    incremental_attention_into,
    paged_attention_into,
    record,
)
from urdir.model.engine.realizar.cached import Launcher
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.families.rope import RopeConfig
from urdir.ptxgen.kernels.rotation import RopeScaling

Floats = npt.NDArray[Any]

#: (query heads, KV heads, head_dim): 1, 2, 4 and 7 query heads a KV head.
SHAPES = [(3, 3, 64), (4, 2, 80), (8, 2, 128), (7, 1, 64)]
#: f32 sums and ex2.approx; the same with a GPU's sines (2^-20.5) in every term of a score; f16
#: queries and probabilities of a prompt.
CLOSE, TURNED_CLOSE, PROMPT_CLOSE = 1e-5, 4e-5, 2e-3


# ---- the independent computation ----


def attend(q: Floats, keys: Floats, values: Floats) -> Floats:
    """One query (heads, head_dim) over keys and values (tokens, kv_heads, head_dim), f64."""
    group = len(q) // keys.shape[1]
    out = np.empty(q.shape)
    for head in range(len(q)):
        k, v = (a[:, head // group].astype(np.float64) for a in (keys, values))
        scores = k @ q[head].astype(np.float64) / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v / weights.sum()
    return out


def turned(x: Floats, position: int, dim: int, base: float, interleaved: bool) -> Floats:
    """Heads (heads, head_dim) turned by RoPE, f64."""
    y = x.astype(np.float64)
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * base ** (-2 * i / dim)
        y[:, a] = x[:, a] * math.cos(angle) - x[:, b] * math.sin(angle)
        y[:, b] = x[:, a] * math.sin(angle) + x[:, b] * math.cos(angle)
    return y


def check(found: Floats, wanted: Floats, tolerance: float = CLOSE) -> None:
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


# ---- the caller's buffers ----


class Tensors:
    """q, k, v and out in device memory, with random values."""

    def __init__(self, at: CachedAttention, rows: int, seed: int = 0) -> None:
        layout, self.rng = at.layout, np.random.default_rng(seed)
        heads = {"q": at.heads, "k": layout.kv_heads, "v": layout.kv_heads, "out": at.heads}
        self.shapes = {name: (rows, n, layout.head_dim) for name, n in heads.items()}
        sizes = {name: 4 * math.prod(shape) for name, shape in self.shapes.items()}
        self.memory: Arena = at.device.arena(sizes, "tensors")
        self.refill()

    def refill(self) -> None:
        for name in "qkv":
            values = self.rng.standard_normal(self.shapes[name]).astype(np.float32)
            self.memory[name].upload(values)

    def __getitem__(self, name: str) -> Floats:
        return self.memory[name].download(np.float32, self.shapes[name])

    @property
    def arguments(self) -> list[Region]:
        return [self.memory[name] for name in ("q", "k", "v", "out")]


def fill(at: CachedAttention, layer: int, lengths: Sequence[int], seed: int = 5) -> None:
    """Random keys and values, ``lengths[s]`` of each sequence."""
    rng = np.random.default_rng(seed)
    for sequence, length in enumerate(lengths):
        shape = (2, length, at.layout.kv_heads, at.layout.head_dim)
        at.store(layer, *rng.standard_normal(shape), sequence=sequence)


@pytest.fixture(scope="module")
def shared(device_name: str) -> Iterator[Device]:
    """One device for the tests that leave it as it was."""
    with Device.open(device_name) as opened:
        yield opened


# ---- what is computed ----


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_incremental_attention(shared: Device, heads: int, kv_heads: int, head_dim: int) -> None:
    """At the first position, one in the middle and the last, in rows of different lengths."""
    with CachedAttention(
        shared, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_len=50, sequences=3, layers=2
    ) as at:
        fill(at, 1, (0, 49, 17))
        tensors, before = Tensors(at, 3), [at.stored(1, sequence=s) for s in range(3)]
        assert incremental_attention_into(at, 1, *tensors.arguments, sequences=(2, 0, 1)) == [
            18,
            1,
            50,
        ]
        assert at.lengths == [[0, 0, 0], [1, 50, 18]]
        for row, sequence in enumerate((2, 0, 1)):
            new = [tensors[name][row : row + 1].astype(np.float16) for name in "kv"]
            keys, values = (np.concatenate(p) for p in zip(before[sequence], new, strict=True))
            for found, wanted in zip(at.stored(1, sequence=sequence), (keys, values), strict=True):
                np.testing.assert_array_equal(found, wanted)
            check(tensors["out"][row], attend(tensors["q"][row], keys, values))


def test_incremental_attention_async_token_by_token(shared: Device) -> None:
    """Two layers in turn, from an empty cache until it is full; results in the cache's buffer."""
    kept: list[list[Floats]] = [[], []]
    with CachedAttention(shared, heads=4, kv_heads=1, head_dim=64, max_len=5, layers=2) as at:
        tensors = Tensors(at, 1)
        for length in range(1, 6):
            for layer in (0, 1):
                tensors.refill()
                kept[layer].append(np.stack([tensors["k"][0], tensors["v"][0]]))
                out, lengths = incremental_attention_async(at, layer, *tensors.arguments[:3])
                assert lengths == [length]
                keys, values = np.stack(kept[layer]).astype(np.float16).swapaxes(0, 1)
                found = out.download(np.float32, (4, 64))
                check(found, attend(tensors["q"][0], keys, values))
        assert at.lengths == [[5], [5]]


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_queries_and_keys_are_turned(shared: Device, style: Any) -> None:
    """Part of a head turns; in a prompt, a decode step and a step in chunks alike."""
    rope = RopeConfig(48, style, 500.0, RopeScaling.none())
    with CachedAttention(
        shared, heads=2, kv_heads=1, head_dim=64, max_len=40, kv_dtype="f32", rope=rope
    ) as at:
        prompt, tensors = Tensors(at, 20), Tensors(at, 1, seed=2)
        first = {name: prompt[name] for name in "qkv"}
        assert flash_attention_multi_head(at, 0, *prompt.arguments, tokens=20) == [20]
        keys = np.stack(
            [turned(k, p, 48, 500.0, style != "half") for p, k in enumerate(first["k"])]
        )
        values = first["v"]
        check(at.stored(0)[0], keys)
        for p, q in enumerate(first["q"]):
            q = turned(q, p, 48, 500.0, style != "half")
            check(prompt["out"][p], attend(q, keys[: p + 1], values[: p + 1]), 2 * PROMPT_CLOSE)
        for position in (20, 21):
            q, k = (turned(tensors[n][0], position, 48, 500.0, style != "half") for n in "qk")
            keys = np.concatenate([keys, k[None]])
            values = np.concatenate([values, tensors["v"]])
            if position == 20:
                incremental_attention_into(at, 0, *tensors.arguments)
            else:
                q0, k0, v0, out = tensors.arguments
                flash_decoding_graphed(at, 0, q0, out, k=k0, v=v0)
            check(tensors["out"][0], attend(q, keys, values), TURNED_CLOSE)
            check(at.stored(0)[0], keys)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_flash_decoding(shared: Device, heads: int, kv_heads: int, head_dim: int) -> None:
    """Over several chunks: what is stored, then with a token more; rows end in different chunks."""
    lengths = (129, 1, 64, 200)
    with CachedAttention(
        shared, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_len=201, sequences=4
    ) as at:
        fill(at, 0, lengths)
        tensors = Tensors(at, 4)
        q, k, v, out = tensors.arguments
        for token, grown in (({}, 0), ({"k": k, "v": v}, 1)):
            found = flash_decoding_graphed(at, 0, q, out, **token, sequences=range(4))
            assert found == [length + grown for length in lengths]
            for row in range(4):
                keys, values = at.stored(0, sequence=row)
                assert len(keys) == lengths[row] + grown
                check(tensors["out"][row], attend(tensors["q"][row], keys, values))
            fill(at, 0, lengths)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_flash_attention(shared: Device, heads: int, kv_heads: int, head_dim: int) -> None:
    """A prompt in two parts, of a sequence beside another."""
    with CachedAttention(
        shared, heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_len=45, sequences=2
    ) as at:
        fill(at, 0, (3, 0))
        for tokens, end in ((40, 40), (5, 45)):
            tensors = Tensors(at, tokens, seed=end)
            found = flash_attention_multi_head(at, 0, *tensors.arguments, tokens=tokens, sequence=1)
            assert found == [end]
            keys, values = at.stored(0, sequence=1)
            for name, stored in (("k", keys), ("v", values)):
                np.testing.assert_array_equal(stored[-tokens:], tensors[name].astype(np.float16))
            for row in range(tokens):
                seen = end - tokens + row + 1
                wanted = attend(tensors["q"][row], keys[:seen], values[:seen])
                check(tensors["out"][row], wanted, PROMPT_CLOSE)
        assert at.lengths == [[3, 45]]


# ---- pages ----


def scattered(device: Device, page_len: int) -> CachedAttention:
    """Three sequences: 41 tokens, a fork of them, and 3; pages are taken out of order."""
    at = CachedAttention(
        device, heads=4, kv_heads=2, head_dim=64, max_len=64, sequences=3, page_len=page_len
    )
    fill(at, 0, (1, 17, 3))
    at.truncate(0, sequence=1)
    fill(at, 0, (41, 0, 3))
    at.fork(0, 1)
    return at


def test_paged_attention_equals_contiguous(shared: Device) -> None:
    """Pages permuted, the last one partial, two sequences sharing pages until both write."""
    outs = []
    for page_len in (0, 16):
        run = paged_attention_into if page_len else incremental_attention_into
        with scattered(shared, page_len) as at:
            table = None
            if page_len:
                table = at.cache.arguments(0)["block_table"].download(np.uint32, (3, 4))
                assert table[0, :3].tolist() == table[1, :3].tolist()  # shared
                assert sorted(table[0, :3]) != table[0, :3].tolist()  # permuted
            tensors = Tensors(at, 3)
            for length in (42, 43):
                tensors.refill()
                found = run(at, 0, *tensors.arguments, sequences=(0, 1, 2))
                assert found == [length, length, length - 38]
                for row in range(3):
                    keys, values = at.stored(0, sequence=row)
                    check(tensors["out"][row], attend(tensors["q"][row], keys, values))
                outs.append(tensors["out"])
            keys, others = (at.stored(0, sequence=s)[0] for s in (0, 1))
            np.testing.assert_array_equal(keys[:41], others[:41])
            assert (keys[41:] != others[41:]).any()
    np.testing.assert_array_equal(outs[0], outs[2])
    np.testing.assert_array_equal(outs[1], outs[3])


def test_layers_share_pages_that_one_of_them_leaves(shared: Device) -> None:
    """Writing a page of a fork in one layer keeps what the others have in it."""
    with CachedAttention(
        shared, heads=1, head_dim=64, max_len=48, layers=2, sequences=2, page_len=16
    ) as at:
        for layer in (0, 1):
            fill(at, layer, (40,), seed=layer)
        kept = at.stored(1)
        at.fork(0, 1)
        fill(at, 0, (40, 16))
        tensors = Tensors(at, 1)
        assert paged_attention_into(at, 0, *tensors.arguments, sequences=(1,)) == [17]
        keys, values = at.stored(0, sequence=1)
        check(tensors["out"][0], attend(tensors["q"][0], keys, values))
        for sequence in (0, 1):
            for found, wanted in zip(at.stored(1, sequence=sequence), kept, strict=True):
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("nth", [1, 2])
def test_an_allocation_that_fails_frees_the_rest(nth: int) -> None:
    api = bindings.emulated()
    with Device.open("emulator", api=api) as device:
        free, _ = device.memory_info()
        api.inject("allocation", nth=nth)
        with pytest.raises(OutOfMemoryError):
            CachedAttention(device, heads=1, head_dim=64, max_len=16)
        assert device.memory_info()[0] == free


def test_paged_attention_needs_pages(shared: Device) -> None:
    with CachedAttention(shared, heads=1, head_dim=64, max_len=4) as at:
        with pytest.raises(ModelError, match="contiguous"):
            paged_attention_into(at, 0, *Tensors(at, 1).arguments)
        assert at.lengths == [[0]]


# ---- what is refused ----


def _into(to: Launcher, q: Region, k: Region, v: Region, out: Region) -> list[int]:
    return incremental_attention_into(to, 1, q, k, v, out)


def _async(to: Launcher, q: Region, k: Region, v: Region, out: Region) -> list[int]:
    return incremental_attention_async(to, 1, q, k, v)[1]


def _paged(to: Launcher, q: Region, k: Region, v: Region, out: Region) -> list[int]:
    return paged_attention_into(to, 1, q, k, v, out)


def _split(to: Launcher, q: Region, k: Region, v: Region, out: Region) -> list[int]:
    return flash_decoding_graphed(to, 1, q, out, k=k, v=v)


def _prompt(to: Launcher, q: Region, k: Region, v: Region, out: Region) -> list[int]:
    return flash_attention_multi_head(to, 1, q, k, v, out, tokens=2)


Operation = Callable[[Launcher, Region, Region, Region, Region], list[int]]
OPERATIONS: list[Operation] = [_into, _async, _paged, _split, _prompt]


def state(at: CachedAttention) -> list[Any]:
    """Lengths, the bytes of the caches, and the block table."""
    layers = range(len(at.cache.shape.owners))
    memory = [m for layer in layers for m in at.cache.arguments(layer).values()]
    return [[list(n) for n in at.lengths], [m.download(np.uint8).tobytes() for m in memory]]


def small(device: Device, page_len: int = 16, rope: bool = False) -> CachedAttention:
    at = CachedAttention(
        device,
        heads=2,
        kv_heads=1,
        head_dim=64,
        max_len=16,
        layers=2,
        page_len=page_len,
        rope=RopeConfig(64, "half", 1e4, RopeScaling.none()) if rope else None,
    )
    fill(at, 0, (3,))
    fill(at, 1, (3,))
    return at


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("rope", [False, True])
def test_a_buffer_is_refused_by_name(
    shared: Device, device_name: str, operation: Operation, rope: bool
) -> None:
    names = ("q", "k", "v") if operation is _async else ("q", "k", "v", "out")
    with small(shared, rope=rope) as at, Device.open(device_name) as other:
        tensors, before = Tensors(at, 2), state(at)
        closed = shared.allocate(1024, "closed one")
        closed.close()
        far = other.allocate(1024, "far one")
        bad: list[tuple[Any, str]] = [
            (None, "null"),
            (closed, "'closed one' is closed"),
            (tensors.memory["q"].slice(0, 16, "bit"), "'bit' has 16"),
            (far, "'far one' belongs to another"),
        ]
        for (value, text), (place, name) in itertools.product(bad, enumerate(names)):
            arguments = tensors.arguments
            arguments[place] = value
            with pytest.raises(LaunchError, match=f"layer 1.*argument '{name}'.*{text}"):
                operation(at, *arguments)
            assert state(at) == before
            if value is not far:  # which a recording refuses when it ends
                continue
            with pytest.raises(LaunchError, match=f"layer 1.*argument '{name}'.*{text}"):
                record(at, lambda to, given=arguments: operation(to, *given))
            assert state(at) == before


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("page_len", [0, 16])
def test_a_full_cache_is_refused(shared: Device, operation: Operation, page_len: int) -> None:
    if operation is _paged and not page_len:
        return
    with small(shared, page_len) as at:
        tensors = Tensors(at, 2)
        with record(at, lambda to: operation(to, *tensors.arguments)) as step:
            fill(at, 1, (16,))
            before = state(at)
            for launch in (lambda: operation(at, *tensors.arguments), step.launch):
                with pytest.raises(ContextFullError, match="exceed the cache's 16"):
                    launch()
                assert state(at) == before
            at.truncate(14)
            assert step.launch() in ([15], [16])


def test_pages_that_run_out_are_refused(shared: Device) -> None:
    with CachedAttention(
        shared, heads=1, head_dim=64, max_len=64, sequences=2, page_len=16, pages=3
    ) as at:
        fill(at, 0, (16, 32))
        tensors, before = Tensors(at, 2), state(at)
        with pytest.raises(ContextFullError, match="full: 1 pages of 16"):
            paged_attention_into(at, 0, *tensors.arguments, sequences=(0, 1))
        assert state(at) == before
        at.truncate(16, sequence=1)
        assert paged_attention_into(at, 0, *tensors.arguments) == [17]


def test_rows_that_make_no_sense_are_refused(shared: Device) -> None:
    with CachedAttention(shared, heads=1, head_dim=64, max_len=8, layers=2, sequences=2) as at:
        tensors = Tensors(at, 2)
        q, k, v, out = tensors.arguments
        for layer, sequences, text in (
            (2, (0,), "layer 2: the cache has 2"),
            (-1, (0,), "layer -1"),
            (0, (2,), "sequence 2: the cache has 2"),
            (0, (0, 0), "each once"),
            (0, (), "at least one"),
        ):
            with pytest.raises(ModelError, match=text):
                incremental_attention_into(at, layer, q, k, v, out, sequences=sequences)
            with pytest.raises(ModelError, match=text):
                incremental_attention_async(at, layer, q, k, v, sequences=sequences)
        with pytest.raises(ModelError, match="at least one"):
            flash_attention_multi_head(at, 0, q, k, v, out, tokens=0)
        with pytest.raises(ModelError, match="empty"):
            flash_decoding_graphed(at, 0, q, out)
        with pytest.raises(ModelError, match="tokens, 1, 64"):
            at.store(0, np.zeros((3, 1, 32)), np.zeros((3, 1, 64)))
        assert at.lengths == [[0, 0], [0, 0]]


# ---- launches that fail, launches that wait for nothing ----


class Watched:
    """A driver's functions: how often each was called, and a launch that fails."""

    def __init__(self, api: Any) -> None:
        self.api, self.calls = api, Counter[str]()
        self.failing = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            self.calls[name] += 1
        if name == "cuLaunchKernelEx" and self.calls[name] == self.failing:
            return lambda *_: (self.api.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,)
        return getattr(self.api, name)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("nth", [1, 2])
def test_the_length_stays_where_a_launch_fails(operation: Operation, nth: int) -> None:
    api = Watched(bindings.emulated())
    with Device.open("emulator", api=api) as device, small(device) as at:
        tensors = Tensors(at, 2)
        api.failing = nth
        with pytest.raises(CudaError, match="OUT_OF_RESOURCES"):
            operation(at, *tensors.arguments)
        assert at.lengths == [[3], [3]]
        (length,) = operation(at, *tensors.arguments)
        assert at.lengths == [[3], [length]]
        keys, values = at.stored(1)
        np.testing.assert_array_equal(keys[3:], tensors["k"][: length - 3].astype(np.float16))
        if operation is not _async:
            last = length - 4
            wanted = attend(tensors["q"][last], keys, values)
            check(tensors["out"][last], wanted, PROMPT_CLOSE)


def test_nothing_waits_and_nothing_is_allocated() -> None:
    """From the second token of a layer on there are launches alone."""
    api = Watched(bindings.emulated())
    with Device.open("emulator", api=api) as device, small(device) as at:
        tensors = Tensors(at, 1)
        q, k, v, out = tensors.arguments
        with record(at, lambda to: incremental_attention_into(to, 1, q, k, v, out)) as step:
            for layer in (0, 1):
                incremental_attention_async(at, layer, q, k, v)
            api.calls.clear()
            for layer in (0, 1):
                incremental_attention_async(at, layer, q, k, v)
            allowed = {"cuCtxSetCurrent", "cuCtxGetCurrent", "cuLaunchKernelEx"}
            assert set(api.calls) <= allowed
            assert api.calls["cuLaunchKernelEx"] == 4
            api.calls.clear()
            step.launch()
            assert set(api.calls) <= {"cuCtxSetCurrent", "cuGraphLaunch"}
            assert at.lengths == [[5], [6]]


# ---- recording ----


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_replay_equals_eager(shared: Device, operation: Operation, rope: bool) -> None:
    """Bit for bit, with one node a launch, replay after replay."""
    found = []
    for is_recorded in (False, True):
        with small(shared, rope=rope) as at:
            tensors = Tensors(at, 2)
            with record(at, lambda to, given=tensors.arguments: operation(to, *given)) as step:
                assert at.lengths == [[3], [3]]  # nothing has run
                assert step.node_count == len(step.plan)
                for _ in range(3):
                    tensors.refill()
                    lengths = step.launch() if is_recorded else operation(at, *tensors.arguments)
                    out = at.work["heads"].download(np.float32)
                    found.append([lengths, tensors["out"] if operation is not _async else out])
                found.append([at.lengths, *at.stored(1)])
    for eager, replayed in zip(found[:4], found[4:], strict=True):
        assert eager[0] == replayed[0]
        for one, other in zip(eager[1:], replayed[1:], strict=True):
            np.testing.assert_array_equal(one, other)


def test_layers_of_one_recording(shared: Device) -> None:
    """Both layers append, the first is attended to again in chunks: one position in all."""
    with small(shared) as at:
        tensors = Tensors(at, 1)
        q, k, v, out = tensors.arguments
        again = at.device.allocate(out.nbytes, "again")

        def step(to: Launcher) -> None:
            assert incremental_attention_into(to, 0, q, k, v, out) == [4]
            incremental_attention_into(to, 1, q, k, v, out)
            assert flash_decoding_graphed(to, 0, q, again) == [4]

        with record(at, step) as recorded:
            assert recorded.node_count == 5
            for length in (4, 5, 6):
                tensors.refill()
                assert recorded.launch() == [length]
                check(tensors["out"][0], attend(tensors["q"][0], *at.stored(1)))
                check(again.download(np.float32, (2, 64)), attend(tensors["q"][0], *at.stored(0)))
            incremental_attention_into(at, 1, q, k, v, out)
            assert recorded.launch() == [7]
            assert at.lengths == [[7], [8]]
            check(tensors["out"][0], attend(tensors["q"][0], *at.stored(1)))
            with pytest.raises(Exception, match="held by"):
                again.close()


def test_steps_that_have_no_one_position_are_not_recorded(shared: Device) -> None:
    with small(shared) as at:
        tensors = Tensors(at, 2)
        q, k, v, out = tensors.arguments

        def twice(to: Launcher) -> None:
            for _ in range(2):
                incremental_attention_into(to, 0, q, k, v, out)

        def attended_before(to: Launcher) -> None:
            flash_decoding_graphed(to, 0, q, out)
            incremental_attention_into(to, 0, q, k, v, out)

        def prompts(to: Launcher) -> None:
            for layer, tokens in ((0, 2), (1, 3)):
                flash_attention_multi_head(to, layer, q, k, v, out, tokens=tokens)

        for step in (twice, attended_before):
            with pytest.raises(ModelError, match="layer 0 is in the step already"):
                record(at, step)
        with pytest.raises(LaunchError, match="argument 'k'"):
            record(at, prompts)
        with pytest.raises(ModelError, match="without operations"):
            record(at, lambda to: None)
        fill(at, 1, (5,))

        def both(to: Launcher) -> None:
            for layer in (0, 1):
                flash_attention_multi_head(to, layer, q, k, v, out, tokens=2)

        before = state(at)
        with record(at, both) as step, pytest.raises(ModelError, match="several lengths"):
            step.launch()
        assert state(at) == before
