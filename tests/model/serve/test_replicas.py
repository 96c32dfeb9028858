"""`urdir serve --ray`: what flags refuse, and (--full) two replicas on a Ray of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.patience import wait_for
from tests.processes import end_of, running, start_python
from urdir.model.commands import values
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Metrics
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics

QUESTION = {
    "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
    "temperature": 0,
    "max_tokens": 20,
}
ANSWER = "2 plus 3 is 5."
STARTED = 240.0  # seconds that two emulated engines may take on a slow machine
#: Two replicas without the command; the device of one of them is lost once there is a file.
LOSING = """
import os, sys
from pathlib import Path
from ray import serve
from ray.serve.config import HTTPOptions
from urdir.model.commands.serve import application
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.serve import replicas
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.served_model import EngineModel

port, sign = int(sys.argv[1]), Path(sys.argv[2])

def open_service():
    class Service(AsyncService):
        is_lost = False

        @property
        def lost(self):
            if not self.is_lost and sign.exists():
                sign.unlink(missing_ok=True)
                self.is_lost = True
            return RuntimeError("lost") if self.is_lost else None

    engine = Engine.open(device="emulator", sequences=2, context=256, text=True)
    return Service(engine, EngineModel(engine, (), 64, Defaults()))

serve.start(http_options=HTTPOptions(port=port))
assert isinstance(application({"flags": "--device emulator --replicas 0-3"}), serve.Application)
scale = replicas.Scale(least=2, most=2, busy=2, gpus=0)
serve.run(replicas.application(open_service, Access(), Limits(), scale))
print("ready", file=sys.stderr, flush=True)
input()
"""
#: Kills the actor of a replica.
KILL = """
import sys, ray
ray.init(address="auto", log_to_driver=False)
ray.kill(ray.get_actor("SERVE_REPLICA::urdir#Replica#" + sys.argv[1], namespace="serve"))
"""
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with as much of Ray as a replica takes."""
    if find_spec("ray") is None:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
        toy = SimpleNamespace(ingress=lambda: lambda of: of, get_replica_context=lambda: context)
        parts = {
            "ray": SimpleNamespace(serve=toy),
            "ray.serve": toy,
            "ray.serve.config": SimpleNamespace(AutoscalingConfig=None, RequestRouterConfig=None),
            "ray.serve.metrics": SimpleNamespace(Gauge=None),
        }
        for name, part in parts.items():
            monkeypatch.setitem(sys.modules, name, part)
    else:
        from ray import serve

        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
        monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    name = "urdir.model.serve.replicas"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(name)
    sys.modules.pop(name, None)


def test_a_replica_ends_after_responses_in_the_background(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that begin meanwhile."""
    done = list[str]()

    class Service:
        async def close(self) -> None:
            done.append("closed")

    def made(*_: Any, tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        return tasks

    async def end() -> None:
        replica = replicas.Replica(Service, Access(), Limits())
        tasks = replica.__serve_build_asgi_app__()

        async def write(*others: str) -> None:
            await asyncio.sleep(0.01)
            for name in others:
                begin(name)
            done.append("written")

        def begin(*others: str) -> None:
            tasks.add(task := asyncio.create_task(write(*others[1:])))
            task.add_done_callback(tasks.discard)

        begin("first", "second")
        await release(replica)

    release = replicas.Replica.__del__
    monkeypatch.delattr(replicas.Replica, "__del__")  # Ray alone calls it
    monkeypatch.setattr(replicas, "make_app", made)
    asyncio.run(end())
    assert done == ["written", "written", "closed"]


@pytest.mark.parametrize(("text", "span"), [("2", (2, 2)), ("1-4", (1, 4)), ("0-1", (0, 1))])
def test_numbers_of_replicas(text: str, span: tuple[int, int]) -> None:
    assert values.number_or_span(text) == span


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--replicas", "2"], "--replicas is for replicas on Ray: add --ray"),
        (["--router", "a.B"], "--router is for replicas on Ray: add --ray"),
        (["--ray", "--replicas", "0"], "0 must be at least 1"),
        (["--ray", "--replicas", "3-2"], "'3-2' is not MIN-MAX"),
        (["--ray", "--replicas", "1-b"], "'b' is not a whole number"),
        (["--ray", "--gpus", "0,1"], "--gpus by number with --ray: Ray chooses them"),
        (["--ray", "--device", "cuda:1"], "device cuda:1 with --ray: Ray chooses the GPU"),
        (["--ray", "--port", "0"], "--port 0 with --ray: give the port"),
        (["--ray", "--drain", "0"], "--drain with --ray: Ray's own server does that"),
        (["--ray", "--ssl-cert-file", "c"], "--ssl-cert-file with --ray"),
    ],
)
def test_what_flags_refuse(
    flags: list[str], error: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = cli("serve", *flags)
    assert code == 2
    assert error in err


def test_figures_say_whose_they_are() -> None:
    metrics, now = ServerMetrics(), Metrics(pages_total=99)
    metrics.say_whose("abc")
    metrics.counts.count_response("/", 200)
    samples = {(s.name, *s.labels.items()): s.value for s in metrics.samples(now)}
    assert samples["urdir_replica_info", ("id", "abc")] == 1
    assert samples["urdir_http_responses_total", ("route", "/"), ("status", "200")] == 1
    assert samples["urdir_pages_total",] == 99
    assert b'urdir_replica_info{id="abc"} 1.0\n' in metrics.text(now)


class Cluster:
    """Two replicas of the demo model."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=url, timeout=STARTED, trust_env=False, verify=False)

    def ask(self, **fields: Any) -> str:
        reply = self.http.post("/v1/chat/completions", json={**QUESTION, **fields})
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    def figures(self, name: str) -> dict[str, float]:
        """A figure of every replica that answers, by its id."""
        found = {}
        for _ in range(20):
            lines = self.http.get("/metrics").text.splitlines()
            (whose,) = (line.split('"')[1] for line in lines if "urdir_replica_info{" in line)
            found[whose] = next(float(line.split()[1]) for line in lines if line.split()[0] == name)
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, STARTED)


@contextlib.contextmanager
def started(command: list[str], port: int, sign: str) -> Iterator[Cluster]:
    """A cluster of its own, once a line of stderr has ``sign``."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    process = start_python(*command, stdin=pipe, stderr=pipe, env=environment)
    with running(process):
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if sign in line:
                break
        else:
            pytest.fail("".join(seen))
        cluster = Cluster(process, port)
        with cluster.http:
            yield cluster
        process.send_signal(signal.SIGINT)
        end_of(process)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port = free_port()
    flags = ["--replicas", "2", "--device", "emulator", "-c", "256", "-np", "2"]
    command = ["-m", "urdir.model", "serve", "--ray", *flags, "--port", str(port)]
    with started(command, port, "replicas on Ray: http://127.0.0.1:") as found:
        yield found
    assert found.process.returncode == 0


@needs_ray
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestTwoReplicas:
    def test_both_answer_the_same(self, cluster: Cluster) -> None:
        cluster.wait_for(lambda: len(cluster.figures("urdir_queued")) == 2)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: cluster.ask(), range(8)))
        assert answers == [ANSWER] * 8
        generated = cluster.figures("urdir_generated_tokens_total")
        assert len(generated) == 2
        assert all(generated.values())

    def test_a_stream_comes_in_pieces(self, cluster: Cluster) -> None:
        with cluster.http.stream(
            "POST", "/v1/chat/completions", json={**QUESTION, "stream": True}
        ) as reply:
            events = [line for line in reply.iter_lines() if line]
        assert len(events) > 5
        assert events[-1] == "data: [DONE]"

    def test_a_client_that_leaves_ends_its_answer(self, cluster: Cluster) -> None:
        long = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": 250}
        with cluster.http.stream("POST", "/v1/completions", json=long) as reply:
            next(reply.iter_lines())
            assert sum(cluster.figures("urdir_running").values()) == 1
        before = sum(cluster.figures("urdir_generated_tokens_total").values())
        cluster.wait_for(lambda: not any(cluster.figures("urdir_running").values()))
        assert sum(cluster.figures("urdir_generated_tokens_total").values()) < before + 100

    def test_errors_come_through(self, cluster: Cluster) -> None:
        reply = cluster.http.post("/v1/embeddings", json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unsupported_endpoint")

    def test_a_replica_that_is_killed_is_replaced(self, cluster: Cluster) -> None:
        before = set(cluster.figures("urdir_queued"))
        assert len(before) == 2
        subprocess.run([sys.executable, "-c", KILL, min(before)], check=True, capture_output=True)
        assert cluster.ask() == ANSWER
        cluster.wait_for(lambda: bool(set(cluster.figures("urdir_queued")) - before))
        assert max(before) in cluster.figures("urdir_queued")
        assert [cluster.ask() for _ in range(4)] == [ANSWER] * 4


@needs_ray
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_whose_device_is_lost_is_replaced(tmp_path: Path) -> None:
    port, sign = free_port(), tmp_path / "sign"
    with started(["-c", LOSING, str(port), str(sign)], port, "ready") as cluster:
        cluster.wait_for(lambda: len(cluster.figures("urdir_queued")) == 2)
        before = set(cluster.figures("urdir_queued"))
        sign.touch()
        cluster.wait_for(lambda: bool(set(cluster.figures("urdir_queued")) - before))
        cluster.wait_for(lambda: len(set(cluster.figures("urdir_queued")) & before) == 1)
        assert cluster.ask() == ANSWER
