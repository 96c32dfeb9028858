"""A router's models in processes of their own: what they serve, how they end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.tiny_encoder import write_encoder
from tests.patience import PATIENCE, wait_for
from tests.processes import beginning, end_of, kill, start_python
from urdir.model import demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
ASKED = {"prompt": "By the old mill", "max_tokens": 1, "temperature": 0}


def _is_tracker(folder: Path) -> bool:
    """Whether a process of /proc is multiprocessing's own."""
    with suppress(OSError):
        return b"resource_tracker" in (folder / "cmdline").read_bytes()
    return False


class Served:
    """`urdir serve` with these flags."""

    def __init__(self, *flags: str) -> None:
        self.process = start_python(
            *("-m", "urdir.model", "serve", "--port", "0", *flags),
            stderr=subprocess.PIPE,
            env={**os.environ, "URDIR_DEVICE": "emulator"},
        )
        assert self.process.stderr is not None
        with beginning(self.process):
            self.greeting = self.process.stderr.readline()
            found = re.search(r"http://\S+", self.greeting)
            assert found is not None, self.greeting + self.process.stderr.read()
        self.http = httpx.Client(base_url=found[0], timeout=PATIENCE, trust_env=False)

    def ask(self, model: str, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": model, **ASKED, **more})

    @property
    def descendants(self) -> list[int]:
        """All processes below the router, but for what multiprocessing needs itself."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if not _is_tracker(folder):
                    stat = (folder / "stat").read_text().rpartition(")")[2].split()
                    if stat[0] != "Z":
                        parents[int(folder.name)] = int(stat[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def end(self) -> tuple[int, str]:
        os.killpg(self.process.pid, signal.SIGINT)
        code, _, errors = end_of(self.process)
        return code, errors


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    servers = []

    def start(*flags: str) -> Served:
        servers.append(Served(*flags))
        return servers[-1]

    yield start
    for server in servers:
        server.http.close()
        kill(server.process)


def alive(pids: list[int]) -> list[int]:
    """Those that live, but for trackers, which look like their parents before they execute."""
    return [pid for pid in pids if _is_alive(pid) and not _is_tracker(Path(f"/proc/{pid}"))]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_folder_of_models(serve: Callable[..., Served], tmp_path: Path) -> None:
    shutil.copy(demo_model(), tmp_path / "demo.gguf")
    write_encoder(tmp_path / "encoder.gguf")
    (tmp_path / "broken.gguf").write_text("no model")
    preset = tmp_path / "presets.toml"
    preset.write_text('api-workers = 0\n[demo]\nctx-size = 48\nalias = "teller"\napi-workers = 1\n')
    flags = ("--models-dir", str(tmp_path), "--models-preset", str(preset), "--models-max", "1")
    server = serve(*flags, "-np", "2")
    assert server.greeting.startswith("3 models, loaded on demand: http://127.0.0.1:")
    assert server.descendants == []
    said = server.ask("teller").json()
    assert said["model"] == "demo"
    listed = {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}
    assert listed["demo"]["max_model_len"] == 48
    assert listed["teller"]["status"] == {"value": "loaded"}
    demos = server.descendants
    assert len(demos) >= 3  # the first process, the engine's and a front end
    assert "not a GGUF file" in server.ask("broken").json()["error"]["message"]
    embedded = server.http.post("/v1/embeddings", json={"model": "encoder", "input": "a"}).json()
    assert len(embedded["data"][0]["embedding"]) > 3
    wait_for(lambda: not alive(demos))
    assert server.http.get("/v1/models/demo").json()["status"] == {"value": "unloaded"}
    encoder = server.descendants[0]
    os.kill(encoder, signal.SIGKILL)
    wait_for(
        lambda: (
            server.http.get("/v1/models/encoder").json()["status"].get("cause")
            == "its process has ended: killed by SIGKILL"
        )
    )
    (tmp_path / "demo.gguf").unlink()
    assert server.ask("demo").status_code == 404
    again = server.http.post("/v1/embeddings", json={"model": "encoder", "input": "a"})
    assert again.json()["data"] == embedded["data"]
    encoders = server.descendants
    code, errors = server.end()
    assert code == 0, errors
    wait_for(lambda: not alive(encoders))
    assert "Traceback" not in errors
    assert errors.count("finishing open requests") == 1


@pytest.mark.full  # idle models: test_loading.py
def test_one_model_sleeps_and_ends_with_its_router(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    path = write_encoder(tmp_path / "encoder.gguf")
    server = serve("-m", str(path), "--sleep-idle-seconds", "2")
    seen: list[int] = []

    def has_slept() -> bool:
        seen.extend(server.descendants)
        return bool(seen and server.http.get("/health").json()["models"]["unloaded"])

    wait_for(has_slept)  # it is loaded from the start on
    wait_for(lambda: not alive(seen))
    for name in ("encoder.gguf", "tiny encoder", None):  # any name that it has
        asked = server.http.post("/v1/embeddings", json={"model": name, "input": "a"})
        assert asked.status_code == 200
    processes: list[int] = []
    while not processes:  # it may sleep again
        server.http.post("/v1/embeddings", json={"input": "a"})
        processes = server.descendants
    server.process.kill()
    wait_for(lambda: not alive(processes))
