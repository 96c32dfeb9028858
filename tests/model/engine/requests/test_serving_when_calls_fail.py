"""Every function of the driver fails once while requests are served.

Whichever call it is: the requests concerned end with an error that names it, the others with their
whole answers, and so do those that come after; no page and nothing on the device stays behind. A
lost device says so to all, and another engine can be opened. (test_every_call_fails.py does so with
one sequence.)
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from urdir.driver import bindings
from urdir.driver.cache import CacheWarning
from urdir.driver.emulator.api import FUNCTIONS
from urdir.driver.errors import DriverError
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.families import synthetic
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

#: Functions of the default run; --full takes all, and every call of them.
WHILE_SERVING = ("cuMemcpyHtoDAsync", "cuGraphLaunch", "cuEventRecord", "cuEventSynchronize")
FROM_OPEN_TO_CLOSE = ("cuMemHostAlloc", "cuGraphInstantiate", "cuStreamDestroy")
#: Nobody is told where what is unreachable, or goes with its context, cannot be ended.
SILENT = {"cuGraphDestroy", "cuModuleUnload", "cuCtxGetCurrent", "cuCtxSetCurrent"}
SILENT |= {"cuEventDestroy"}
#: A cached kernel that fails is compiled anew, with a warning.
REBUILT = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetParamInfo", "cuFuncGetAttribute"}
REBUILT |= {"cuFuncSetAttribute"}

GREEDY = SamplingSettings(temperature=0.0)
DRAWN = SamplingSettings(seed=3, logprobs=2)
BEGIN = (1, 5, 6, 7) * 5  # which two prompts share
REQUESTS = (
    Request(prompt=BEGIN, settings=GREEDY, limit=3, ignore_end=True),
    Request(prompt=(*BEGIN, 8), settings=DRAWN, limit=3, ignore_end=True),
    Request(prompt=(1, 5, 6), settings=GREEDY, limit=2, constraint=Constraint.choice(["ab", "b"])),
    Request(prompt=(1, 6, 6), settings=GREEDY, limit=2, ignore_end=True),
)
SEQUENCES = 2
VOCAB = 64
Found = list[int] | DriverError  # the tokens of an answer, or why there is none


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, without which a run takes seconds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tokenizer(make_gguf: Callable[..., Path]) -> Tokenizer:
    """Letters and pairs of letters, and an end."""
    letters = [chr(ord("a") + n) for n in range(26)]
    tokens = [*letters, *(a + b for a in letters for b in letters)][: VOCAB - 1]
    keys = {
        "model": "gpt2", "tokens": [*tokens, "</s>"], "merges": [], "eos_token_id": VOCAB - 1,
        "token_type": np.array([1] * (VOCAB - 1) + [3], np.int32),
    }  # fmt: skip
    with Gguf(make_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})) as gguf:
        return Tokenizer.of(gguf)


@contextmanager
def opened(api: Any, cache: Path | None) -> Iterator[Engine]:
    """An engine on ``api``: one layer, two sequences, five pages of 16 tokens."""
    shape = Shape("llama", 1, 64, 2, 1, 32, 64, VOCAB, tied=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        patch.setattr(bindings, "emulated", lambda *_, **__: api)
        patch.setitem(synthetic.SHAPES, "tiny", shape)
        with Engine.open(
            synthetic.SyntheticModel("tiny", "q8_0"), device="emulator", context=48,
            sequences=SEQUENCES, page_len=16, pages=5, cache_folder=cache,
        ) as engine:  # fmt: skip
            yield engine


def serve(engine: Engine, tokenizer: Tokenizer) -> list[Found]:
    """What came of all requests at once, and of one after them; nothing is left of them."""
    with Service(engine, tokenizer) as service:
        found = [*ask(service, REQUESTS), *ask(service, REQUESTS[-1:])]
        metrics = service.metrics()
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    return found


def ask(service: Service, requests: tuple[Request, ...]) -> list[Found]:
    """What came of requests at once: nothing but answers and errors of the driver."""
    items: list[SimpleQueue[Item]] = [SimpleQueue() for _ in requests]
    answers: list[Answer] = []
    with pytest.MonkeyPatch.context() as patch:  # as many calls, each time
        patch.setattr(service, "add", answers.append)
        for request, queue in zip(requests, items, strict=True):
            service.submit(request, queue.put)
    service._inbox.put(lambda: [*map(service._loop.add, answers)] and None)
    found: list[Found] = []
    for queue in items:
        tokens: list[int] = []
        while isinstance(item := queue.get(timeout=250), Piece):
            tokens += [choice.token for choice in item.choices]
        assert isinstance(item, Ending | DriverError), item
        found.append(tokens if isinstance(item, Ending) else item)
    return found


def some_of(count: int) -> set[int]:
    """The first of so many calls, and one of the middle."""
    return {n for n in (1, count // 2 + 1) if n <= count}


def names_the_call(error: object) -> bool:
    return isinstance(error, DriverError) and "CUDA_ERROR_UNKNOWN" in str(error)


@pytest.mark.slow
@pytest.mark.usefixtures("own_garbage")
def test_serving_goes_on_after_any_call(
    cache: Path, tokenizer: Tokenizer, pytestconfig: pytest.Config
) -> None:
    """One engine survives them all: of a step that fails the requests end, those that wait and
    those that come later are answered."""
    is_full = pytestconfig.getoption("--full")
    api = bindings.emulated()
    with opened(api, cache) as engine:
        expected = serve(engine, tokenizer)
        before, live = Counter(api.event_counts), api.live()
        assert serve(engine, tokenizer) == expected
        calls = Counter(api.event_counts) - before
        threads = set(threading.enumerate())
        for name in FUNCTIONS if is_full else WHILE_SERVING:
            for nth in range(1, calls[name] + 1) if is_full else some_of(calls[name]):
                where = f"call {nth} of {name}"
                api.inject(name, nth)
                try:
                    found = serve(engine, tokenizer)
                except DriverError as error:  # before the first request, or at the end
                    found = [error.with_traceback(None)]  # which holds what was made
                failed = [f for f in found if f not in expected]
                assert all(map(names_the_call, failed)), where
                assert failed or name in SILENT, where
                assert len(failed) <= SEQUENCES, where
                assert not api.pending_faults(), where
                assert set(threading.enumerate()) <= threads, where
                gc.collect()
                if name in SILENT:  # what was not destroyed goes with its context
                    live |= {"event": api.live()["event"]}
                assert api.live() == live, where
        assert serve(engine, tokenizer) == expected
    assert api.live() == {}


@pytest.mark.slow
@pytest.mark.usefixtures("own_garbage")
def test_every_function_fails_from_open_to_close(
    cache: Path, tokenizer: Tokenizer, pytestconfig: pytest.Config
) -> None:
    api = bindings.emulated()
    expected = use(api, cache, tokenizer)
    calls = dict(api.event_counts)
    threads, is_full = set(threading.enumerate()), pytestconfig.getoption("--full")
    for name in FUNCTIONS if is_full else FROM_OPEN_TO_CLOSE:
        folder = None if name.startswith("cuLink") else cache
        count = calls.get(name, 0)
        for nth in some_of(count) | ({count} - {0} if is_full else set()):
            where = f"call {nth} of {name}"
            api = bindings.emulated()
            api.inject(name, nth)
            found = use(api, folder, tokenizer)
            failed = [f for f in found if f not in expected]
            assert all(map(names_the_call, failed)), where
            assert failed or name in SILENT | REBUILT, where
            gc.collect()
            assert not api.pending_faults(), where
            assert set(threading.enumerate()) <= threads, where
            left = {"context": 1} if name == "cuDevicePrimaryCtxRelease" else {}
            assert api.live() == left, where
        if name in calls:
            assert use(api, folder, tokenizer) == expected, name


def use(api: Any, cache: Path | None, tokenizer: Tokenizer) -> list[Found]:
    """What came of the requests of an engine, and what its end or its beginning raised."""
    found: list[Found] = []
    try:
        with opened(api, cache) as engine:
            found = serve(engine, tokenizer)
    except DriverError as error:
        found.append(error)
    return found


@pytest.mark.slow
def test_a_lost_device_is_named(cache: Path, tokenizer: Tokenizer) -> None:
    """To the requests that it fails, to those that wait and to those that come; another engine can
    be opened."""
    api = bindings.emulated()
    with opened(api, cache) as engine:
        expected = serve(engine, tokenizer)
        with Service(engine, tokenizer) as service:
            assert service.lost is None
            api.inject("launch", 20)
            found = [*ask(service, REQUESTS), *ask(service, REQUESTS[-1:])]
            lost = service.lost
    assert isinstance(lost, DeviceLostError)
    assert "the device is lost, open the model again: " in str(lost)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(lost)
    assert found == [lost] * 5
    gc.collect()
    assert api.live() == {}
    assert use(api, cache, tokenizer) == expected
