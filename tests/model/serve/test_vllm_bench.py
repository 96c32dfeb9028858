"""What vLLM's `bench serve` sends, and what its client makes of the events, beside our figures.

The requests and the rules are those of its functions for "openai" and "openai-chat".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from tests.model.serve.conftest import Gate
from tests.patience import PATIENCE, in_some_try
from urdir.model.measure.http_events import HttpServer
from urdir.model.measure.load import Ask, summarise
from urdir.model.measure.load_server import ask_server

TOKENS, DELAY = 6, 0.02
TEXT = "One and two and three."


@dataclass
class Output:
    """Seconds: to the first event with choices, between later ones, and to the last."""

    text: str = ""
    parts: int = 0
    tokens: int = 0
    first: float = 0.0
    between: list[float] = field(default_factory=list)
    latency: float = 0.0

    @property
    def per_token(self) -> float:
        """TPOT."""
        return (self.latency - self.first) / (self.tokens - 1)


def request(path: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "toy",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if path == "/v1/completions":
        return body | {"prompt": TEXT, "max_tokens": TOKENS, "logprobs": None}
    content = [{"type": "text", "text": TEXT}]
    messages = [{"role": "user", "content": content}]
    return body | {"messages": messages, "max_completion_tokens": TOKENS}


async def ask(url: str, path: str, seen: Callable[[], None] = lambda: None) -> Output:
    """The answer; ``seen`` is called at its first event."""
    output = Output()
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as http:
        start = latest = time.perf_counter()
        async with http.stream("POST", url + path, json=request(path)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line or line.startswith(":") or line == "data: [DONE]":
                    continue
                event, now = json.loads(line.removeprefix("data: ")), time.perf_counter()
                if choices := event.get("choices"):
                    if not output.first:
                        output.first = now - start
                        seen()
                    else:
                        output.between.append(now - latest)
                    latest = now
                    part = choices[0].get("delta", {}).get("content") or choices[0].get("text")
                    output.text += part or ""
                    output.parts += bool(part)
                elif usage := event.get("usage"):
                    output.tokens = usage["completion_tokens"]
        output.latency = latest - start
    return output


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_its_figures(server: Any, path: str) -> None:
    """The first event comes with the first token, before the others; and there are no more events
    than tokens but those without text."""
    server.service.delay, server.service.repeat = DELAY, 10
    asyncio.run(ask(server.url, path))  # as it does, before it measures
    server.service.gate = gate = Gate(1)
    output = asyncio.run(ask(server.url, path, gate.open))
    _, asked = server.service.requests
    assert (asked.limit, asked.ignore_end, asked.settings.is_greedy) == (TOKENS, True, True)
    assert output.tokens == TOKENS
    assert output.text
    assert output.parts <= TOKENS
    assert output.first >= DELAY
    assert output.latency >= TOKENS * DELAY


def test_they_are_those_of_bench_load(server: Any) -> None:
    """TTFT is "first token", TPOT "a token after the first"."""
    server.service.delay, server.service.repeat = DELAY, 10

    def check() -> None:
        output = asyncio.run(ask(server.url, "/v1/completions"))
        send = partial(ask_server, HttpServer.parse(server.url), "toy")
        reply = asyncio.run(send(Ask(0.0, server.service.requests[0].prompt, TOKENS)))
        assert (reply.error, reply.tokens) == (None, TOKENS)
        _, (first, _, per_token, _) = summarise([reply])
        assert first.p50 is not None
        assert per_token.p50 is not None
        assert first.p50 / 1e3 == pytest.approx(output.first, abs=5 * DELAY)
        assert per_token.p50 / 1e3 == pytest.approx(output.per_token, abs=DELAY)

    in_some_try(check)
