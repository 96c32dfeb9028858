"""A server of `apart_server` in processes of its own, for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE
from tests.processes import beginning, end_of, kill, start_python

PROGRAM = Path(__file__).with_name("apart_server.py")
ASKED: dict[str, Any] = {"model": "paced", "prompt": "By the old mill", "max_tokens": 8, "seed": 5}


class Apart:
    """A server of `apart_server`, in processes of its own."""

    def __init__(self, *flags: str) -> None:
        pipe = subprocess.PIPE
        self.process = start_python(str(PROGRAM), *flags, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        with beginning(self.process):
            self.url = self.process.stdout.readline().strip()
            assert self.url, end_of(self.process)
        self.port = int(self.url.rpartition(":")[2])
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def ask(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=ASKED | more)

    @property
    def engine(self) -> int:
        """The engine's process, which has front ends."""
        (engine,) = (pid for pid in children(self.process.pid) if children(pid))
        return engine

    @property
    def fronts(self) -> list[int]:
        return children(self.engine)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, once all processes have ended."""
        code, _, errors = end_of(self.process)
        return code, errors

    def close(self) -> None:
        """End it in any case."""
        self.http.close()
        kill(self.process)


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


@pytest.fixture
def start() -> Iterator[Callable[..., Apart]]:
    servers: list[Apart] = []

    def begin(*flags: str) -> Apart:
        servers.append(Apart(*flags))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Apart]:
    """One for the tests that leave it whole."""
    server = Apart("--sequences", "1000", "--step", "0.005")
    with contextlib.closing(server):
        yield server
        body = ASKED | {"max_tokens": 100, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.terminate()  # what is open is answered
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.http.close()
        code, errors = server.end()
    assert code == 0, errors
    assert errors.count("a front end has ended (-9), another begins") <= 1
    assert "Traceback" not in errors


def figure(server: Apart, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def ask_and_drop(server: Apart, body: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
