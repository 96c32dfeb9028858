"""A server under load for a time, round after round, and what each of its processes holds then.

    PYTHONPATH=.src python -m tests.model.serve.soak --seconds 3600 --api-workers 2

`urdir serve demo` runs on the emulator (``--device``). Among its clients are some whose answers
reach the end of the context, some that vanish, and some whose requests must be refused. A round is
a minute of load. When the server is idle again, a row for every process says its resident memory,
open files, threads and asyncio tasks, and how many pages of the cache are in use. Exit code 1: an
answer was wrong, or something was larger in the last third of the rounds than before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from tests.model.serve.hostile_bodies import CHAT, COMPLETIONS, HOSTILE, REFUSED
from urdir.model.measure.http_events import HttpServer, ServerError

QUESTIONS = Path(__file__).parents[2] / "data" / "demo" / "eval.jsonl"
CLIENTS = 6
#: Tokens, the most that a cache has room for: no step may lie beyond it.
CONTEXT = 256
#: By how much prompts are shorter than that whose answers reach the end.
SHORT = (1, 2, 3, 4, 7, 30)
#: What a process may have more of in the last third of the rounds. The emulator keeps registers of
#: each kernel that it has run, which a step of a new shape adds to.
GROWTH = {"bytes": 256 << 20, "files": 2, "threads": 2, "tasks": 2}
RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
#: Of every Python process of the server: writes its number of asyncio tasks on SIGUSR1.
_TASKS = """
import asyncio, gc, os, signal
from pathlib import Path

def count(*_):
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    path = Path(os.environ["URDIR_SOAK_DIR"], f"{os.getpid()}.new")
    path.write_text(str(sum(not each.done() for each in tasks)))
    path.rename(path.with_suffix(".tasks"))

signal.signal(signal.SIGUSR1, count)
"""


class Load:
    """Clients that ask one question after another, and what came of it."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._end = server, 0.0
        self._rng = random.Random(5)
        read = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        few = [q for q in read if len(json.dumps(q["messages"])) < 250]  # that fit its few pages
        self._questions = [q for q in few if q["expected"] and q["id"] != "who_has-3"]
        self.counts = Counter[str]()
        self.wrong: list[object] = []
        self._ends: dict[int, str] = {}  # texts that reach the end, as they were first
        self._http: httpx.AsyncClient

    async def run(self, seconds: float) -> None:
        """Until so many seconds are over and all is answered."""
        self._end = time.monotonic() + seconds
        url = f"http://{self._server.host}:{self._server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=3600, trust_env=False) as self._http:
            await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        ways = {
            self._answer: 10,
            self._to_the_end: 4,
            self._long: 2,
            self._leave: 2,
            self._vanish: 3,
            self._constrained: 1,
            self._refused: 1,
            self._hostile: 4,
            self._background: 2,
        }
        while time.monotonic() < self._end:
            way = self._rng.choices([*ways], [*ways.values()])[0]
            self.counts[way.__name__.lstrip("_")] += 1
            await way(self._rng.choice(self._questions))

    async def _texts(self, body: dict[str, Any], most: int = 1 << 30) -> list[str]:
        """The text of each answer; of ``most`` events, after which the client leaves."""
        texts = [""] * body.get("n", 1)
        async with aclosing(self._server.events(CHAT, {**body, "stream": True})) as events:
            async for event in events:
                if "error" in event:
                    self.wrong.append(event)
                for choice in event.get("choices", ()):
                    texts[choice["index"]] += choice["delta"].get("content", "")
                if (most := most - 1) <= 0:
                    break
        return texts

    async def _answer(self, question: dict[str, Any]) -> None:
        asked = {"messages": question["messages"], "temperature": 0}
        asked["n"] = self._rng.choice((1, 1, 2))
        for text in await self._texts(asked):
            if text != question["expected"]:
                self.wrong.append((question["id"], text))

    async def _long(self, question: dict[str, Any]) -> None:
        """Beside others of its kind, more than a small cache has pages for."""
        await self._texts({"messages": question["messages"], "ignore_eos": True, "max_tokens": 90})

    async def _to_the_end(self, question: dict[str, Any]) -> None:
        """The same text each time, as long as the context."""
        short = self._rng.choice(SHORT)
        prompt = [10 + (7 * n + short) % 200 for n in range(CONTEXT - short)]
        asked = {"prompt": prompt, "max_tokens": -1, "ignore_eos": True, "temperature": 0}
        reply = await self._http.post(COMPLETIONS, json=asked)
        if reply.status_code != HTTPStatus.OK:
            self.wrong.append((short, reply.text))
            return
        answer = reply.json()
        (choice,) = answer["choices"]
        tokens = answer["usage"]["completion_tokens"]
        text = self._ends.setdefault(short, choice["text"])
        if (choice["finish_reason"], tokens, choice["text"]) != ("length", short + 1, text):
            self.wrong.append((short, answer))

    async def _background(self, question: dict[str, Any]) -> None:
        """A response that is asked for later, or cancelled."""
        asked = {"input": question["messages"], "background": True, "temperature": 0}
        asked["stream"] = False
        found = (await self._http.post(RESPONSES, json=asked)).json()
        path = f"{RESPONSES}/{found['id']}"
        if self._rng.random() < 0.3:
            found = (await self._http.post(f"{path}/cancel", json={})).json()
        while found["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.2)
            found = (await self._http.get(path)).json()
        if found["status"] == "completed":
            text = found["output"][-1]["content"][0]["text"]
            if text != question["expected"]:
                self.wrong.append((question["id"], text))
        elif found["status"] != "cancelled":
            self.wrong.append(found)
        await self._http.delete(path)

    async def _hostile(self, question: dict[str, Any]) -> None:
        """What is refused, whoever else is served."""
        make = self._rng.choice(HOSTILE)
        path, body = make(self._rng)
        headers = {"Content-Type": "application/json"}
        try:
            reply = await self._http.post(path, content=body, headers=headers)
        except httpx.TransportError:
            return  # hung up on before all was sent
        if reply.status_code not in REFUSED:
            self.wrong.append((make.__name__, reply.status_code, reply.text[:200]))

    async def _vanish(self, question: dict[str, Any]) -> None:
        """Reset the connection: within the head, the body, or an answer."""
        asked = {"messages": question["messages"], "stream": True, "ignore_eos": True}
        body = json.dumps({**asked, "max_tokens": 60}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {self._server.host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = head.encode() + body
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            whole = self._rng.random() < 0.7
            writer.write(sent if whole else sent[: self._rng.randrange(len(sent))])
            await writer.drain()
            if whole and self._rng.random() < 0.7:
                await reader.read(self._rng.randint(1, 3_000))
        finally:
            writer.transport.abort()

    async def _leave(self, question: dict[str, Any]) -> None:
        await self._texts({"messages": question["messages"]}, self._rng.randint(1, 6))

    async def _constrained(self, question: dict[str, Any]) -> None:
        schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        asked = {"messages": question["messages"], "response_format": schema, "max_tokens": 120}
        (text,) = await self._texts(asked)
        with suppress(ValueError):  # cut at its length
            if json.loads(text)["a"] not in (1, 2):
                self.wrong.append(text)

    async def _refused(self, question: dict[str, Any]) -> None:
        with suppress(ServerError):
            texts = await self._texts({"messages": question["messages"] * 400})
            self.wrong.append(("not refused", texts))


# ---- what processes hold ----


def children(root: int) -> list[int]:
    """The processes below ``root``, it included."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            parents.setdefault(int(parent), []).append(int(folder.name))
    found = [root]
    for process in found:
        found += parents.get(process, ())
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds; None tasks: it does not say."""

    bytes: int
    files: int
    threads: int
    tasks: int | None

    @classmethod
    def of(cls, process: int, tasks: Path) -> Held:
        """Of a process, whose number of tasks is in a file. OSError if it has ended."""
        folder = Path(f"/proc/{process}")
        return cls(
            int((folder / "statm").read_text().split()[1]) * resource.getpagesize(),
            len([*(folder / "fd").iterdir()]),
            len([*(folder / "task").iterdir()]),
            int(tasks.read_text()) if tasks.exists() else None,
        )

    def __str__(self) -> str:
        tasks = "" if self.tasks is None else f" {self.tasks} tasks"
        return f"{self.bytes / 1e6:.1f} MB {self.files} files {self.threads} threads{tasks}"


def _handles(process: int) -> bool:
    """Whether a process handles SIGUSR1, which ends others."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"SigCgt:\s*(\w+)", status)
    return found is not None and bool(int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def look(root: int, folder: Path) -> dict[int, Held]:
    """What each process of a server holds."""
    processes = children(root)
    asked = []
    for process in processes:
        with suppress(OSError):
            if _handles(process):
                (folder / f"{process}.tasks").unlink(missing_ok=True)
                os.kill(process, signal.SIGUSR1)
                asked.append(folder / f"{process}.tasks")
    end = time.monotonic() + 20
    while time.monotonic() < end and not all(path.exists() for path in asked):
        time.sleep(0.1)
    found = {}
    for process in processes:
        with suppress(OSError):
            found[process] = Held.of(process, folder / f"{process}.tasks")
    return found


def growth(rounds: list[dict[int, Held]]) -> list[str]:
    """What grew in the last third of the rounds, of processes that were there in all of them."""
    late = max(1, len(rounds) * 2 // 3)
    found = []
    for process in set.intersection(*map(set, rounds)):
        for name, most in GROWTH.items():
            values = [getattr(each[process], name) or 0 for each in rounds]
            before, after = max(values[:late]), max(values[late:], default=0)
            if after - before > most:
                found.append(f"process {process}: {before:,} {name}, then {after:,}")
    return found


# ---- the server ----


@contextlib.contextmanager
def serving(device: str, workers: int, folder: Path) -> Iterator[tuple[int, HttpServer]]:
    """A server's process and its URL."""
    (folder / "sitecustomize.py").write_text(_TASKS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    flags = ["-m", "demo", "-dev", device, "-c", str(CONTEXT), "-np", "4"]
    flags += ["--port", "0", "--api-workers", str(workers)]
    log = folder / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "urdir.model", "serve", *flags],
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path, "URDIR_SOAK_DIR": str(folder)},
        )
    try:
        while (found := re.search(r"http://\S+\d", log.read_text())) is None:
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        yield process.pid, HttpServer.parse(found[0])
        process.send_signal(signal.SIGTERM)
        if process.wait(600):
            raise RuntimeError(f"exit code {process.returncode}: {log.read_text()}")
    finally:
        process.kill()
        process.wait()


async def _metrics(server: HttpServer) -> dict[str, float]:
    url = f"http://{server.host}:{server.port}/metrics"
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        reply = await http.get(url)
    lines = [line.rpartition(" ") for line in reply.text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in lines}


async def idle(server: HttpServer, seconds: float = 60) -> dict[str, float]:
    """The metrics once nothing runs, or as they are after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        with suppress(httpx.HTTPError, KeyError):
            now = await _metrics(server)
            if not now["urdir_running"] + now["urdir_queued"] or time.monotonic() > end:
                return now
        await asyncio.sleep(0.2)


async def soak(root: int, server: HttpServer, folder: Path, args: argparse.Namespace) -> list[str]:
    """Rounds of load; what was wrong."""
    end = time.monotonic() + args.seconds
    await idle(server, args.seconds)  # the model is loaded
    load, rounds, wrong = Load(server), [], []
    while time.monotonic() < end:
        await load.run(min(args.round, max(end - time.monotonic(), 1)))
        now = await idle(server)
        await asyncio.sleep(2)  # connections are being closed
        rounds.append(look(root, folder))
        pages = now["urdir_pages_used"]
        print(f"round {len(rounds)}, {sum(load.counts.values())} requests, {pages:.0f} pages used")
        for process, held in rounds[-1].items():
            print(f"  {process}: {held}", flush=True)
        if pages or now["urdir_running"] or now["urdir_queued"]:
            wrong.append(f"round {len(rounds)}: {now}")
    print(dict(load.counts))
    return [*wrong, *map(str, load.wrong), *growth(rounds)]


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--round", type=float, default=60.0, help="seconds of load in a round (60)")
    parser.add_argument("--api-workers", type=int, default=0, help="as of `urdir serve` (0)")
    parser.add_argument("--device", default="emulator")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="urdir-soak-") as name:
        folder = Path(name)
        with serving(args.device, args.api_workers, folder) as (root, server):
            wrong = asyncio.run(soak(root, server, folder, args))
        stderr = (folder / "stderr").read_text()
    print(stderr[-2000:])
    print(*(wrong or ["nothing grew, nothing was wrong"]), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
