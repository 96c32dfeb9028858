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
from urdir.model.engine.answer import Item
from urdir.model.engine.engine import Engine
from urdir.model.engine.request import Ending, Piece, Request
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.engine.service import DeviceLostError, Service
from urdir.model.files.gguf import Gguf
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

#: Functions of the default run; --full takes all.
SAMPLE = (
    "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuGraphLaunch", "cuEventRecord",
    "cuEventSynchronize", "cuEventCreate", "cuGraphInstantiate",
)  # fmt: skip
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
    Request(prompt=BEGIN, settings=GREEDY, limit=4, ignore_end=True),
    Request(prompt=(*BEGIN, 8), settings=GREEDY, limit=4, ignore_end=True),
    Request(prompt=(1, 9), settings=DRAWN, limit=4, ignore_end=True),
    Request(prompt=(1, 5, 6), settings=GREEDY, limit=3, constraint=Constraint.choice(["ab", "b"])),
    Request(prompt=(1, 6, 6), settings=GREEDY, limit=4, ignore_end=True),
)
Tokens = list[int]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, without which a run takes seconds."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def opened(api: Any, cache: Path) -> Iterator[Engine]:
    """An engine on ``api``: two sequences, five pages of 16 tokens."""
    file = Path(__file__).parents[2] / "data" / "golden" / "nano-llama-q8_0.gguf"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        patch.setattr(bindings, "emulated", lambda target: api)
        with Engine.open(
            file, device="emulator", context=48, sequences=2, page_len=16, pages=5, cache_folder=cache
        ) as engine:  # fmt: skip
            yield engine


@pytest.fixture
def tokenizer(make_gguf: Callable[..., Path]) -> Tokenizer:
    """As many tokens as the model's vocabulary has."""
    letters = [chr(97 + n) for n in range(26)]
    tokens = [*letters, *(a + b for a in letters for b in letters)][:319] + ["</s>"]
    keys = {
        "model": "gpt2", "tokens": tokens, "token_type": np.array([1] * 319 + [3], np.int32),
        "merges": [], "eos_token_id": 319,
    }  # fmt: skip
    with Gguf(make_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})) as gguf:
        return Tokenizer.from_gguf(gguf)


def serve(engine: Engine, tokenizer: Tokenizer) -> list[Tokens | DriverError]:
    """What came of all requests, at once and then one by one; nothing is left of them."""
    with Service(engine, tokenizer) as service:
        found = ask(service, REQUESTS)
        for request in REQUESTS[2:4]:
            found += ask(service, [request])
        metrics = service.metrics()
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    return found


def ask(service: Service, requests: Any) -> list[Tokens | DriverError]:
    items: list[SimpleQueue[Item]] = [SimpleQueue() for _ in requests]
    for request, queue in zip(requests, items, strict=True):
        service.submit(request, queue.put)
    found: list[Tokens | DriverError] = []
    for queue in items:
        tokens: Tokens = []
        while isinstance(item := queue.get(timeout=30), Piece):
            tokens += [choice.token for choice in item.choices]
        assert isinstance(item, Ending | DriverError), item
        found.append(tokens if isinstance(item, Ending) else item)
    return found


def nths(count: int, all_of_them: bool) -> Iterator[int]:
    """Which of so many calls fail."""
    yield from range(1, count + 1) if all_of_them else sorted({1, count // 2 + 1, count})


@pytest.mark.slow
def test_serving_goes_on_after_any_call(
    cache: Path, tokenizer: Tokenizer, pytestconfig: pytest.Config
) -> None:
    """One engine, which survives all of them."""
    is_full = pytestconfig.getoption("--full")
    api = bindings.emulated()
    with opened(api, cache) as engine:
        expected = serve(engine, tokenizer)
        before, live = dict(api.event_counts), api.live()
        assert serve(engine, tokenizer) == expected
        calls = {name: n - before[name] for name, n in api.event_counts.items()}
        threads = threading.active_count()
        for name in FUNCTIONS if is_full else SAMPLE:
            for nth in nths(calls.get(name, 0), False):
                where = f"call {nth} of {name}"
                api.inject(name, nth)
                try:
                    found = serve(engine, tokenizer)
                except DriverError as error:  # before the first request, or at the end
                    assert "CUDA_ERROR_UNKNOWN" in str(error), where
                    found = expected
                wrong = [f for f, e in zip(found, expected, strict=True) if f != e]
                print(where, len(wrong))
                assert all("CUDA_ERROR_UNKNOWN" in str(error) for error in wrong), where
                assert not api.pending_faults(), where
                assert threading.active_count() == threads, where
                assert api.live() == live, where
    gc.collect()
    assert api.live() == {}
