"""`urdir bench --load` against the toy, and what it makes of the replies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.serve.conftest import Gate
from urdir.model.errors import ModelError, SettingsError
from urdir.model.measure.http_events import HttpServer, ServerError
from urdir.model.measure.load import Ask, Lengths, LoadCase, Reply, plan_load, run_load, summarise
from urdir.model.measure.load_server import ask_server
from urdir.model.serve.access import Access

Cli = Callable[..., tuple[int, str, str]]


def asker(server: Any) -> Callable[[Ask], Coroutine[Any, Any, Reply]]:
    return partial(ask_server, HttpServer.parse(server.url), "toy")


def test_what_is_sent() -> None:
    case = LoadCase(
        requests=2000, inputs=Lengths(5, 40), outputs=Lengths(3, 9), shared=8, rate=50.0, seed=3
    )
    asks = plan_load(case, 1000)
    assert asks == plan_load(case, 1000)
    lengths = [len(ask.prompt) for ask in asks]
    assert (min(lengths), max(lengths)) == (5, 40)
    assert {ask.tokens for ask in asks} == set(range(3, 10))
    long = [ask.prompt for ask in asks if len(ask.prompt) > 16]
    assert len({prompt[:8] for prompt in long}) == 1
    assert len({prompt[8:] for prompt in long}) == len(long)
    assert all(0 <= token < 1000 for prompt in long for token in prompt)
    pauses = np.diff([0.0, *(ask.at for ask in asks)])
    # a Poisson process: exponential pauses, whose mean and deviation are one over the rate
    assert pauses.mean() == pytest.approx(1 / 50, rel=0.1)
    assert pauses.std() == pytest.approx(1 / 50, rel=0.1)
    assert {ask.at for ask in plan_load(LoadCase(requests=3), 10)} == {0.0}


def test_lengths_around_a_mean() -> None:
    """As those of CNN-DailyMail's articles: of one sign, a few far above the mean."""
    case = LoadCase(requests=4000, inputs=Lengths.around(780, 340))
    asks = plan_load(case, 10)
    assert asks == plan_load(case, 10)
    lengths = np.array([len(ask.prompt) for ask in asks])
    assert lengths.mean() == pytest.approx(780, rel=0.03)
    assert lengths.std() == pytest.approx(340, rel=0.05)
    assert 1 <= lengths.min() < 200
    assert 1800 < lengths.max() <= case.inputs.high == 780 + 4 * 340
    assert np.median(lengths) < lengths.mean()


def test_the_figures() -> None:
    replies = [
        Reply(
            start=10 + i,
            first=10.1 + i + i / 100,
            end=12 + i,
            gaps=[0.02] * 10,
            prompt_tokens=100,
            cached_tokens=25,
            tokens=11,
        )
        for i in range(101)
    ]
    throughput, latencies = summarise([*replies, Reply(start=0, end=500, error="no")])
    assert (throughput.requests, throughput.failed, throughput.seconds) == (102, 1, 102)
    assert throughput.input_tokens_per_second == pytest.approx(101 * 100 / 102)
    assert throughput.output_tokens_per_second == pytest.approx(101 * 11 / 102)
    assert throughput.cached_share == 0.25
    first, between, _, whole = latencies
    assert (first.count, first.p50, first.p90, first.p99, first.most) == pytest.approx(
        (101, 600, 1000, 1090, 1100)
    )
    assert (between.count, between.mean, between.p99) == pytest.approx((1010, 20, 20))
    assert whole.p50 == pytest.approx(2000)
    with pytest.raises(ModelError, match="all 1 requests failed: no"):
        summarise([Reply(start=0, error="no")])


def test_users_ask_one_after_another(server: Any) -> None:
    service = server.service
    service.delay, service.repeat, service.gate = 0.005, 100, Gate()
    most = 0
    generate = service.generate

    def counted(request: Any) -> Any:
        nonlocal most
        most = max(most, service.running + 1)
        if most == 3:
            service.gate.open()
        return generate(request)

    service.generate = counted
    case = LoadCase(requests=9, inputs=Lengths(20, 30), outputs=Lengths(4, 7), users=3)
    asks = plan_load(case, 100)
    replies = asyncio.run(run_load(asker(server), case, asks))
    assert most == 3
    sent = sorted((request.prompt, request.limit) for request in service.requests)
    assert sent == sorted((ask.prompt, ask.tokens) for ask in asks)
    assert all(request.ignore_end and request.settings.is_greedy for request in service.requests)
    assert all(reply.error is None and len(reply.gaps) == reply.tokens - 1 for reply in replies)
    assert sorted(reply.tokens for reply in replies) == sorted(ask.tokens for ask in asks)
    _, (first, between, _, _) = summarise(replies)
    assert first.p50 is not None
    assert first.p50 >= 5
    gaps = [1000 * gap for reply in replies for gap in reply.gaps]
    assert between.p50 == pytest.approx(np.median(gaps))


def test_random_arrivals(server: Any) -> None:
    """An answer is not waited for: none ends before all have begun."""
    service = server.service
    service.gate, generate = Gate(1), server.service.generate

    def counted(request: Any) -> Any:
        if len(service.requests) == 11:
            service.gate.open()
        return generate(request)

    service.generate = counted
    case = LoadCase(requests=12, inputs=Lengths(4, 4), outputs=Lengths(2, 2), rate=20.0)
    asks = plan_load(case, 100)
    begin = time.perf_counter()
    replies = asyncio.run(run_load(asker(server), case, asks))
    starts = sorted(reply.start for reply in replies)
    assert all(start >= begin + ask.at - 0.001 for start, ask in zip(starts, asks, strict=True))
    assert max(starts) < min(reply.end for reply in replies)


def test_the_command(start: Any, cli: Cli, tmp_path: Path) -> None:
    server = start(Access(api_keys=("key",)))
    server.service.repeat = 10
    flags = ("--requests", "6", "--users", "2", "--input", "10-20", "--answer", "5")
    target = ("bench", "--load", f"{server.url}/v1", "--api-key", "key")
    code, out, _ = cli(*target, *flags)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"toy at {server.url}/v1")
    assert lines[1] == "2 users, 10-20 tokens in, 5 out"
    cells = [line.split("|")[1].strip(" :-") for line in lines if line.startswith("|")]
    assert [cell for cell in cells if cell] == [
        "requests",
        "6",
        "ms",
        "first token",
        "between tokens",
        "a token after the first",
        "whole answer",
    ]
    code, out, _ = cli(*target, *flags, "-o", "json")
    found = json.loads(out)
    assert (code, found["load"][0]["requests"], found["load"][0]["failed"]) == (0, 6, 0)
    assert found["latency"][1]["count"] == 6 * 4


def test_the_plot(server: Any, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.png"
    flags = ("--requests", "3", "--input", "4", "--answer", "5", "--plot", picture)
    assert cli("bench", "--load", server.url, *flags)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_servers_that_fail(server: Any, cli: Cli) -> None:
    server.service.error = ModelError("the device is lost")
    server.service.good = 2
    code, _, err = cli("bench", "--load", server.url, "--requests", "2", "--input", "4")
    assert (code, err) == (
        1,
        "urdir: error: all 2 requests failed: the device is lost\n",
    )
    code, _, err = cli("bench", "--load", server.url, "--requests", "2", "--input", "600")
    assert code == 1
    assert "400 this model's maximum context length is 512 tokens: the prompt has 600" in err
    code, _, err = cli("bench", "--load", "http://127.0.0.1:9", "--requests", "2")
    assert (code, err.count("\n")) == (1, 1)
    assert "127.0.0.1:9/v1/models: no connection" in err


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://a:x", "http://[a"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(SettingsError):
        HttpServer.parse(url)


def test_answers_that_break_off() -> None:
    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {}\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server = HttpServer.parse(f"http://127.0.0.1:{port}")
            assert [event async for event in server.events("/x", {})] == []

    with pytest.raises(ServerError, match="the answer broke off"):
        asyncio.run(ask())
