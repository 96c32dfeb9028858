"""A server under load for minutes, on the emulator: memory flat, no page lost, no wrong answer.

Among its clients are some whose answers reach the end of the context, some that vanish, and some
that send what is to be refused. ``--soak SECONDS`` says for how long (600).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.serve.hostile_bodies import CHAT, COMPLETIONS, HOSTILE, REFUSED
from urdir.driver import bindings
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.measure.http_events import HttpServer, ServerError
from urdir.model.serve.interface import Defaults
from urdir.model.serve.served_model import EngineModel

QUESTIONS = Path(__file__).parents[2] / "data" / "demo" / "eval.jsonl"
CLIENTS = 6
#: Tokens, the most that a cache has room for: no step may lie beyond it.
CONTEXT = 256
#: By how much prompts are shorter than that whose answers reach the end.
SHORT = (1, 2, 3, 4, 7, 30)
#: Bytes that the process may grow by in the last third of the time. The emulator keeps registers of
#: each kernel that it has run, which a step of a new shape adds to.
GROWTH = 256 << 20
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


class Load:
    """Clients that ask one question after another, and what came of it."""

    def __init__(self, server: HttpServer, end: float) -> None:
        self._server, self._end = server, end
        self._rng = random.Random(5)
        read = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        few = [q for q in read if len(json.dumps(q["messages"])) < 250]  # that fit its few pages
        self._questions = [q for q in few if q["expected"] and q["id"] != "who_has-3"]
        self.counts = Counter[str]()
        self.wrong: list[object] = []
        self.memory: list[int] = []
        self._ends: dict[int, str] = {}  # texts that reach the end, as they were first
        self._http = httpx.AsyncClient(
            base_url=f"http://{server.host}:{server.port}", timeout=300, trust_env=False
        )

    async def run(self) -> None:
        """Until the time is up; memory is noted meanwhile."""
        clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        while not all(client.done() for client in clients):
            await asyncio.sleep(1)
            self.memory.append(memory_of_all())
        await asyncio.gather(*clients)
        await self._http.aclose()

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
        }
        while time.monotonic() < self._end:
            way = self._rng.choices([*ways], [*ways.values()])[0]
            self.counts[way.__name__] += 1
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
        """Beside others of its kind, more than there are pages for."""
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

    async def _hostile(self, question: dict[str, Any]) -> None:
        """What is refused, whoever else is served."""
        make = self._rng.choice(HOSTILE)
        path, body = make(self._rng)
        self.counts[f"hostile {make.__name__}"] += 1
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
        with pytest.raises(ServerError):
            await self._texts({"messages": question["messages"] * 400})


def memory_of_all() -> int:
    """Bytes that this process and its children have."""
    own, pages = str(os.getpid()), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if own in (folder.name, parent):
                pages += int((folder / "statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.full
@pytest.mark.timeout(0)
def test_nothing_grows_and_nothing_is_wrong(
    run_server: Callable[..., AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    api = bindings.emulated()
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: api)
    engine = Engine.open(
        device="emulator", context=CONTEXT, sequences=4, page_len=16, pages=18, text=True
    )
    assert engine.session.shapes.lengths == (CONTEXT,)
    limits = replace(Limits.for_latency(engine.session.shapes), wait_seconds=3600)
    service = AsyncService(
        engine, EngineModel(engine, ["demo"], engine.session.context, Defaults()), limits
    )
    try:
        with run_server(service) as server:
            load = Load(
                HttpServer.parse(server.url), time.monotonic() + pytestconfig.getoption("--soak")
            )
            asyncio.run(load.run())
            server.wait_for(lambda: asyncio.run(service.metrics()).running == 0)
        metrics = asyncio.run(service.metrics())
    finally:
        asyncio.run(service.close())
    late = len(load.memory) * 2 // 3
    growth = max(load.memory[late:]) - max(load.memory[:late])
    print(f"{load.counts}, {growth:,} bytes more, {metrics}")
    assert load.wrong == []
    ways = ("_answer", "_to_the_end", "_vanish", "_hostile")
    assert all(load.counts[way] > 0 for way in ways)
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    assert growth < GROWTH
    gc.collect()
    assert api.live() == {}
