"""What a driver refuses while requests are served, a launch or memory; and a kernel that faults.

(test_serving_when_calls_fail.py makes every call of the emulated driver fail.)
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import cuda.bindings.driver as cuda
import pytest

from urdir.driver.errors import CudaError, OutOfMemoryError
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import GREEDY

SEQUENCES = 3
PROMPTS = ["By the old mill", "What is 2 plus 3?", "Red", "Once there was", "The dog"]
Found = list[int] | Exception  # the tokens of an answer, or why there is none


@pytest.fixture
def engine(device_name: str) -> Iterator[Engine]:
    with Engine.open(
        device=device_name, sequences=SEQUENCES, page_len=16, context=64, text=True
    ) as opened:
        yield opened


@pytest.fixture
def ask_all(engine: Engine) -> Iterator[Callable[[int], list[Found]]]:
    """What comes of every prompt, asked at once for so many tokens each."""
    prompts = [tuple(engine.tokenizer.encode(prompt)) for prompt in PROMPTS]
    patient = replace(Limits.for_latency(engine.session.shapes), wait_seconds=3600)
    with Service(engine, engine.tokenizer, patient) as service:

        def ask(limit: int) -> list[Found]:
            queues = []
            for prompt in prompts:
                queues.append(SimpleQueue[Item]())
                request = Request(prompt=prompt, settings=GREEDY, limit=limit, ignore_end=True)
                service.submit(request, queues[-1].put)
            found: list[Found] = []
            for queue in queues:
                tokens: list[int] = []
                while isinstance(item := queue.get(timeout=250), Piece):
                    tokens += [choice.token for choice in item.choices]
                found.append(tokens if isinstance(item, Ending) else item)
            metrics = service.metrics()
            assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
            return found

        yield ask


@pytest.mark.full
@pytest.mark.slow
def test_a_launch_that_is_refused_fails_its_requests_alone(
    engine: Engine, ask_all: Callable[[int], list[Found]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask_all(6)
    api = engine.device.api
    launch, left = api.cuGraphLaunch, [2]

    def refused_once(graph: Any, stream: Any) -> Any:
        left[0] -= 1
        return launch(cuda.CUgraphExec(0) if left[0] == 0 else graph, stream)

    monkeypatch.setattr(api, "cuGraphLaunch", refused_once)
    found = ask_all(6)
    failed = [error for error in found if isinstance(error, Exception)]
    assert 1 <= len(failed) <= SEQUENCES
    for error in failed:
        assert isinstance(error, CudaError)
        assert not error.sticky
        assert "cuGraphLaunch" in str(error)
    for tokens, right in zip(found, expected, strict=True):
        assert tokens in failed or tokens == right
    assert ask_all(6) == expected


#: What takes memory of the device, in calls of the driver.
TAKERS = ("cuMemAlloc", "cuModuleLoadData", "cuModuleGetFunction", "cuGraphInstantiate")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("served", [0, 20])
def test_without_memory_requests_fail_or_are_answered_right(
    engine: Engine,
    ask_all: Callable[[int], list[Found]],
    monkeypatch: pytest.MonkeyPatch,
    served: int,
) -> None:
    """After so many calls the driver gives no more memory; other tests need the GPU's own."""
    api, left = engine.device.api, [served]
    with monkeypatch.context() as starving:
        for name in TAKERS:
            starving.setattr(api, name, starved_call(api, name, left))
        starved = ask_all(9)
    assert left[0] < 0
    expected = ask_all(9)
    assert all(isinstance(tokens, list) for tokens in expected)
    assert any(isinstance(tokens, OutOfMemoryError) for tokens in starved)
    for tokens, right in zip(starved, expected, strict=True):
        assert isinstance(tokens, OutOfMemoryError) or tokens == right
    assert ask_all(9) == expected


def starved_call(api: Any, name: str, left: list[int]) -> Callable[..., tuple[Any, Any]]:
    """The driver's function of that name, refused when none is left of the calls for all."""
    call = getattr(api, name)

    def ask(*args: Any) -> tuple[Any, Any]:
        left[0] -= 1
        refusal = (api.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        return refusal if left[0] < 0 else call(*args)

    return ask


LOST = """
    import sys
    from queue import SimpleQueue
    from urdir.driver.launch import launch, pack
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.request import Piece, Request
    from urdir.model.engine.requests.service import Service
    sys.path.insert(0, {folder!r})
    import conftest

    with Engine.open(device={name!r}, sequences=2, page_len=16, text=True) as engine:
        device, prompt = engine.device, tuple(engine.tokenizer.encode("By the old mill"))
        with device.create_stream() as stream, Service(engine, engine.tokenizer) as service:
            queues = [SimpleQueue() for _ in range(4)]
            for queue in queues:
                service.submit(Request(prompt=prompt, ignore_end=True), queue.put)
            assert isinstance(queues[0].get(timeout=100), Piece)
            kernel = conftest.TextKernel()
            buffer = device.allocate(4000, "x")
            buffer.fill(0)
            args = pack(kernel, dict(x=buffer, n=1000, y=device.allocate(4000, "y"), scale=1.0))
            args._storage[16:24] = (0x10).to_bytes(8, "little")  # y: no allocation there
            launch(device.load(kernel), args, stream)
            try:
                stream.synchronize()
            except Exception as error:
                print(type(error).__name__)
            for queue in queues:
                while isinstance(item := queue.get(timeout=100), Piece):
                    pass
                print(type(item).__name__, "CUDA_ERROR_ILLEGAL_ADDRESS" in str(item))
            service.submit(Request(prompt=prompt), queues[0].put)
            print(type(queues[0].get(timeout=100)).__name__, type(service.lost).__name__)
    print("closed")
"""


@pytest.mark.full
@pytest.mark.slow
def test_a_kernel_that_faults_ends_all_requests(
    device_name: str, request: pytest.FixtureRequest
) -> None:
    """In a process of its own: a GPU's context does not recover within one."""
    folder = request.path.parents[3] / "driver"
    script = textwrap.dedent(LOST).format(name=device_name, folder=str(folder))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "CudaError",
        *["DeviceLostError True"] * 4,
        "DeviceLostError DeviceLostError",
        "closed",
    ]
