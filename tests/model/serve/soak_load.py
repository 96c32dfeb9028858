"""Clients of a server under load: some whose answers reach the end of the context, some that
vanish, and some whose requests must be refused."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import aclosing, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from tests.model.serve.hostile_bodies import CHAT, COMPLETIONS, HOSTILE, REFUSED
from urdir.model.measure.http_events import HttpServer, ServerError

QUESTIONS = Path(__file__).parents[2] / "data" / "demo" / "eval.jsonl"
#: Tokens, the most that a cache has room for: no step may lie beyond it.
CONTEXT = 256
#: By how much prompts are shorter than that whose answers reach the end.
SHORT = (1, 2, 3, 4, 7, 30)
RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
#: Seconds after which a client comes again to a server that has too much to do.
PAUSE = 2.0


class BusyServerError(Exception):
    """The server has too much to do: a request waited for a minute. On a machine with other load
    that is no fault."""


class Load:
    """``clients`` that ask one question after another, and what came of it. Answers are right or
    wrong unless they are random."""

    def __init__(self, server: HttpServer, clients: int = 6, random_answers: bool = False) -> None:
        self._server, self._clients, self._end = server, clients, 0.0
        self._rng = random.Random(5)
        read = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        few = [q for q in read if len(json.dumps(q["messages"])) < 250]  # that fit its few pages
        self._questions = [q for q in few if q["expected"] and q["id"] != "who_has-3"]
        self.counts = Counter[str]()
        self.wrong: list[object] = []
        self._is_random = random_answers
        self._ends: dict[int, str] = {}  # texts that reach the end, as they were first
        self._http: httpx.AsyncClient

    async def run(self, seconds: float) -> None:
        """Until so many seconds are over and all is answered."""
        self._end = time.monotonic() + seconds
        url = f"http://{self._server.host}:{self._server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=3600, trust_env=False) as self._http:
            await asyncio.gather(*(self._client() for _ in range(self._clients)))

    async def _client(self) -> None:
        """Ask until the time is over; what is not wrong may be refused by a busy server."""
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
            try:
                await way(self._rng.choice(self._questions))
            except BusyServerError:
                self.counts["busy"] += 1
                await asyncio.sleep(PAUSE)
            except Exception as error:
                self.wrong.append((way.__name__, repr(error)))
                await asyncio.sleep(PAUSE)
            else:
                self.counts[way.__name__.lstrip("_")] += 1

    async def _post(self, path: str, body: Any) -> httpx.Response:
        reply = await self._http.post(path, json=body)
        if reply.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            raise BusyServerError
        return reply

    async def _texts(self, body: dict[str, Any], most: int = 1 << 30) -> list[str]:
        """The text of each answer; of ``most`` events, after which the client leaves."""
        texts = [""] * body.get("n", 1)
        try:
            async with aclosing(self._server.events(CHAT, {**body, "stream": True})) as events:
                async for event in events:
                    if "error" in event:
                        self._failed(event["error"])
                    for choice in event.get("choices", ()):
                        texts[choice["index"]] += choice["delta"].get("content", "")
                    if (most := most - 1) <= 0:
                        break
        except ServerError as error:
            if f" {HTTPStatus.TOO_MANY_REQUESTS:d} " in str(error):
                raise BusyServerError from None
            raise
        return texts

    def _failed(self, error: dict[str, Any]) -> None:
        """An answer ended with an error. Raises BusyServerError."""
        if error["code"] == "rate_limit_exceeded":
            raise BusyServerError
        self._misses(error)

    def _misses(self, found: object) -> None:
        """An answer is not as it should be."""
        if not self._is_random:
            self.wrong.append(found)

    async def _answer(self, question: dict[str, Any]) -> None:
        asked = {"messages": question["messages"], "temperature": 0}
        asked["n"] = self._rng.choice((1, 1, 2))
        for text in await self._texts(asked):
            if text != question["expected"]:
                self._misses((question["id"], text))

    async def _long(self, question: dict[str, Any]) -> None:
        """Beside others of its kind, more than a small cache has pages for."""
        await self._texts({"messages": question["messages"], "ignore_eos": True, "max_tokens": 90})

    async def _to_the_end(self, question: dict[str, Any]) -> None:
        """The same text each time, as long as the context."""
        short = self._rng.choice(SHORT)
        prompt = [10 + (7 * n + short) % 200 for n in range(CONTEXT - short)]
        asked = {"prompt": prompt, "max_tokens": -1, "ignore_eos": True, "temperature": 0}
        reply = await self._post(COMPLETIONS, asked)
        if reply.status_code != HTTPStatus.OK:
            self.wrong.append((short, reply.text))
            return
        answer = reply.json()
        (choice,) = answer["choices"]
        tokens = answer["usage"]["completion_tokens"]
        text = self._ends.setdefault(short, choice["text"])
        if (choice["finish_reason"], tokens, choice["text"]) != ("length", short + 1, text):
            self._misses((short, answer))

    async def _background(self, question: dict[str, Any]) -> None:
        """A response that is asked for later, or cancelled."""
        asked = {"input": question["messages"], "background": True, "temperature": 0}
        asked["stream"] = False
        found = (await self._post(RESPONSES, asked)).json()
        path = f"{RESPONSES}/{found['id']}"
        if self._rng.random() < 0.3:
            found = (await self._http.post(f"{path}/cancel", json={})).json()
        while found["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.2)
            found = (await self._http.get(path)).json()
        if found["status"] == "completed":
            text = "".join(part["text"] for item in found["output"] for part in item["content"])
            if text != question["expected"]:
                self._misses((question["id"], text))
        await self._http.delete(path)
        if found["status"] == "failed":
            self._failed(found["error"])
        elif found["status"] == "incomplete":  # random tokens may fill the context
            self._misses(found)
            if found["incomplete_details"] != {"reason": "max_output_tokens"}:
                self.wrong.append(found)
        elif found["status"] not in ("completed", "cancelled"):
            self.wrong.append(found)

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
        try:
            (text,) = await self._texts(asked)
        except ServerError as error:  # a random token is not allowed
            self._misses(error)
            return
        with suppress(ValueError):  # cut at its length
            if json.loads(text)["a"] not in (1, 2):
                self._misses(text)

    async def _refused(self, question: dict[str, Any]) -> None:
        with suppress(ServerError):
            texts = await self._texts({"messages": question["messages"] * 400})
            self.wrong.append(("not refused", texts))
