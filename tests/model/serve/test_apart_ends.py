"""Ends of a server in processes of its own: signals, processes that die, files that are refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.serve.apart import ASKED, Apart, figure, is_open, server, start
from tests.patience import PATIENCE, wait_for
from urdir.model import demo_model
from urdir.model.measure.http_events import HttpServer, ServerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
__all__ = ["server", "start"]  # fixtures


STREAMED: dict[str, Any] = {"stream": True}
DEADLY = 666


def sockets(pid: int) -> int:
    """How many a process has."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += str(file.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.full),  # of a server: test_apart.py
    ],
)
def test_while_the_model_is_loaded(start: Callable[..., Apart], number: signal.Signals) -> None:
    """Requests are refused; all processes end with the first, however that ends."""
    server = start("--load", "600")
    http = server.http
    health = http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "loading")
    assert health.headers["retry-after"] == "1"
    for path in ("/v1/completions", "/v1/messages", "/api/generate"):
        assert http.post(path, json=ASKED).status_code == 503
    for path in ("/metrics", "/lora-adapters", "/v1/responses/resp_1"):
        assert http.get(path).json()["error"]["code"] == "loading"
    slot = http.post("/slots/0?action=erase", json={})
    assert slot.json()["error"]["code"] == "loading"
    http.close()
    server.process.send_signal(number)
    code, errors = server.end()  # front ends have its stderr, too
    assert code == (130 if number == signal.SIGTERM else -number)
    assert not is_open(server.port)
    assert "Traceback" not in errors  # nothing has failed


def test_a_front_end_that_dies_is_replaced(server: Apart) -> None:
    """Its answers end with an error, those of the other go on."""
    text = server.ask(max_tokens=400).json()["choices"][0]["text"]  # 2 s
    found: list[str | None] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE) as http:
            try:
                reply = http.post("/v1/completions", json=ASKED | {"max_tokens": 400})
                found.append(reply.json()["choices"][0]["text"])
            except httpx.HTTPError:
                found.append(None)

    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    before = server.fronts
    idle = [sockets(front) for front in before]
    threads: list[threading.Thread] = []

    def each_has_some() -> bool:
        """Front ends take connections as they can: one may get many. Some answers may have ended
        before the other front end has any."""
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        busy = [sockets(front) - usual for front, usual in zip(before, idle, strict=True)]
        return min(busy) > 2 and figure(server, "urdir_running") > 0

    wait_for(each_has_some)
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert set(found) == {None, text}
    wait_for(lambda: len(server.fronts) == 2)
    assert before[1] in server.fronts
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    wait_for(lambda: figure(server, "urdir_running") == 0)
    for _ in range(4):
        assert server.ask().status_code == 200


@pytest.mark.slow
def test_a_model_that_has_gone_ends_all(start: Callable[..., Apart], tmp_path: Path) -> None:
    """The front end in place of one that dies cannot read it; there is no third."""
    file = tmp_path / "demo.gguf"
    shutil.copy(demo_model(), file)
    server = start("--model", str(file), "--workers", "1")
    file.unlink()
    os.kill(server.fronts[0], signal.SIGKILL)
    code, errors = server.end()
    assert code == 1
    assert errors.count("another begins") == 1
    assert re.search(r"^error: .*demo\.gguf", errors, re.MULTILINE)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_an_engine_that_dies_ends_all(start: Callable[..., Apart]) -> None:
    """With its cause and exit code 1."""
    server = start("--step", "0.01")
    lines: list[str] = []

    def listen() -> None:
        body = ASKED | {"max_tokens": 4000, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False
        ) as response:
            lines.extend(response.iter_lines())

    thread = threading.Thread(target=listen)
    thread.start()
    wait_for(lambda: len(lines) > 4)
    fronts = server.fronts
    refused = server.ask(seed=DEADLY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "device_lost")
    thread.join()
    assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
    code, errors = server.end()
    assert code == 1
    assert "the engine's process has ended: killed by SIGKILL" in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in fronts))


@pytest.mark.full  # of a server of one process: test_command.py
def test_a_second_signal_aborts_what_is_open(start: Callable[..., Apart]) -> None:
    server = start("--step", "0.05")
    body = ASKED | {"max_tokens": 4000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.killpg(server.process.pid, signal.SIGINT)
        wait_for(lambda: not is_open(server.port))
        assert next(lines) == ""  # it goes on
        assert next(lines)
        os.killpg(server.process.pid, signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    code, errors = server.end()
    assert code == 130
    assert errors.count("finishing open requests") == 1
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_third_signal_ends_all_at_once(start: Callable[..., Apart]) -> None:
    """Also front ends that do nothing end with the engine, once they go on."""
    server = start("--workers", "1")
    engine, (front,) = server.engine, server.fronts
    os.kill(front, signal.SIGSTOP)
    sent = 0
    while server.process.poll() is None and sent < PATIENCE:
        server.process.send_signal(signal.SIGINT)
        sent += 1
        with suppress(subprocess.TimeoutExpired):  # two that arrive at once are one
            server.process.wait(0.5 if sent < 3 else 2)
    assert sent >= 3
    assert server.process.returncode == 130
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    os.kill(front, signal.SIGCONT)
    wait_for(lambda: not Path(f"/proc/{front}").exists())
    assert "Traceback" not in server.end()[1]


@pytest.mark.full
@pytest.mark.timeout(0)
def test_a_soak_with_front_ends_that_die(
    start: Callable[..., Apart], pytestconfig: pytest.Config
) -> None:
    """Streams are whole, or their front end was killed; some clients leave. Nothing stays open, and
    the engine does not grow. A minute, unless ``--soak`` is less."""
    seconds = min(60.0, pytestconfig.getoption("--soak"))
    server = start("--sequences", "32", "--step", "0.002", "--workers", "3")
    expected = {seed: server.ask(seed=seed, max_tokens=40).json() for seed in range(4)}
    texts = {seed: reply["choices"][0]["text"] for seed, reply in expected.items()}
    rng, end = random.Random(7), time.monotonic() + seconds
    ended, killed, memory = Counter[str](), 0, list[int]()

    async def client() -> None:
        while time.monotonic() < end:
            seed, leaves = rng.randrange(4), rng.random() < 0.1
            body = ASKED | {"seed": seed, "max_tokens": 40}
            target = HttpServer.parse(server.url)
            text = ""
            try:
                async with aclosing(target.events("/v1/completions", body | STREAMED)) as events:
                    async for event in events:
                        assert "error" not in event, event
                        text += event["choices"][0]["text"]
                        if leaves:
                            ended["left"] += 1
                            break
            except ServerError:
                ended["cut"] += 1
                assert texts[seed].startswith(text)
                continue
            if not leaves:
                ended["whole"] += 1
                assert text == texts[seed]

    async def kill() -> None:
        """Also those that have not begun to serve."""
        nonlocal killed
        while time.monotonic() < end:
            await asyncio.sleep(1)
            memory.append(resident(server.engine))
            os.kill(rng.choice(server.fronts), signal.SIGKILL)
            killed += 1

    async def run() -> None:
        await asyncio.gather(kill(), *(client() for _ in range(16)))

    asyncio.run(run())
    assert killed >= min(seconds / 20, 2)
    assert ended["whole"] > ended["cut"] > 0 < ended["left"]
    wait_for(lambda: len(server.fronts) == 3)
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False)
    wait_for(lambda: figure(server, "urdir_running") == 0)
    assert figure(server, "urdir_queued") == 0
    assert server.ask(seed=1, max_tokens=40).json()["choices"][0]["text"] == texts[1]
    late = len(memory) * 2 // 3
    assert max(memory[late:]) < max(memory[: late or 1]) + (16 << 20)
    server.process.terminate()
    code, errors = server.end()
    assert (code, errors.count("another begins")) == (0, killed)
    assert "Traceback" not in errors


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_file_that_is_refused(tmp_path: Path) -> None:
    """By the command, once, whichever process finds it."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    command = [sys.executable, "-m", "urdir.model", "serve", "--port", "0", "--device", "emulator"]
    command += ["-m", str(tmp_path / "bad.gguf"), "--api-workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"urdir: error: .*bad\.gguf.*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-ot", "nothing=CPU"), "no such tensor"),
        pytest.param(("--device", "abacus"), "abacus", marks=pytest.mark.full),
    ],
)
def test_bad_usage_that_the_engine_finds(flags: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "urdir.model", "serve", "--port", "0", "--device", "emulator"]
    command += ["--api-workers", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
