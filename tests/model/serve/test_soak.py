"""A server under load for minutes, on the emulator: memory flat, no page lost, no wrong answer.

``--soak SECONDS`` says for how long (600).
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from urdir.driver import bindings
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.measure.http_events import HttpServer, ServerError
from urdir.model.serve.interface import Defaults
from urdir.model.serve.served_model import EngineModel

QUESTIONS = Path(__file__).parents[2] / "data" / "demo" / "eval.jsonl"
CHAT = "/v1/chat/completions"
CLIENTS = 6
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

    async def run(self) -> None:
        """Until the time is up; memory is noted meanwhile."""
        clients = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]
        while not all(client.done() for client in clients):
            await asyncio.sleep(1)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.memory.append(pages * resource.getpagesize())
        await asyncio.gather(*clients)

    async def _client(self) -> None:
        ways = (self._answer, self._long, self._leave, self._constrained, self._refused)
        while time.monotonic() < self._end:
            way = self._rng.choices(ways, (10, 2, 3, 1, 1))[0]
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


@pytest.mark.full
@pytest.mark.timeout(0)
def test_nothing_grows_and_nothing_is_wrong(
    run_server: Callable[..., AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    api = bindings.emulated()
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: api)
    engine = Engine.open(device="emulator", sequences=4, page_len=16, pages=14, text=True)
    limits = replace(Limits.for_latency(engine.session.shapes), wait_seconds=3600)
    service = AsyncService(
        engine, lambda owner: EngineModel(engine, ["demo"], owner, Defaults()), limits
    )
    try:
        with run_server(service) as server:
            load = Load(
                HttpServer.parse(server.url), time.monotonic() + pytestconfig.getoption("--soak")
            )
            asyncio.run(load.run())
            server.wait_for(lambda: service.metrics().running == 0)
        metrics = service.metrics()
    finally:
        asyncio.run(service.close())
    late = len(load.memory) * 2 // 3
    growth = max(load.memory[late:]) - max(load.memory[:late])
    print(f"{load.counts}, {growth:,} bytes more, {metrics}")
    assert load.wrong == []
    assert load.counts["_answer"] > 0
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    assert growth < GROWTH
    gc.collect()
    assert api.live() == {}
