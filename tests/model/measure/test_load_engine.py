"""`urdir bench --load` without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.limits import Limits
from urdir.model.measure.load import Lengths, LoadCase, plan_load, summarise
from urdir.model.measure.load_engine import load_engine

Cli = Callable[..., tuple[int, str, str]]


def test_requests_to_an_engine(data: Path) -> None:
    """Without a vocabulary, too. A prompt that does not fit fails alone."""
    case = LoadCase(
        requests=5, inputs=Lengths(20, 24), outputs=Lengths(2, 4), shared=17, rate=200.0
    )
    path = data / "golden" / "nano-llama-q8_0.gguf"
    engine = Engine.open(path, device="emulator", sequences=3, page_len=16, context=64)
    asks = plan_load(case, engine.config.vocab_size)
    long = plan_load(LoadCase(requests=1, inputs=Lengths(90, 90), outputs=Lengths(2, 2)), 100)
    limits = Limits.for_latency(engine.session.shapes)
    done: list[int] = []
    replies, use = asyncio.run(
        load_engine(engine, limits, case, [*asks, *long], lambda reply: done.append(reply.tokens))
    )
    assert [reply.tokens for reply in replies] == done
    good = [reply for reply in replies if reply.error is None]
    (bad,) = [reply.error for reply in replies if reply.error is not None]
    assert "90 tokens exceed the context of 64" in bad
    assert sorted(reply.tokens for reply in good) == sorted(ask.tokens for ask in asks)
    assert sorted(reply.prompt_tokens for reply in good) == sorted(len(a.prompt) for a in asks)
    assert all(len(reply.gaps) == reply.tokens - 1 for reply in good)
    assert sum(reply.cached_tokens >= 16 for reply in good) >= 1  # a page of what is shared
    throughput, latencies = summarise(replies)
    assert (throughput.requests, throughput.failed) == (6, 1)
    assert latencies[0].count == 5
    most, tokens = max(ask.tokens for ask in asks), sum(ask.tokens for ask in asks)
    assert most < use.steps <= tokens + 5
    assert use.busy_seconds > 0 <= use.idle_seconds
    assert use.idle_share == use.idle_seconds / (use.busy_seconds + use.idle_seconds)
    assert not use.preemptions


@pytest.mark.slow
def test_the_command(data: Path, cli: Cli, tmp_path: Path) -> None:
    path = data / "golden" / "nano-llama-q8_0.gguf"
    target = ("bench", path, "--load", "--device", "emulator", "-np", "3")
    flags = ("--requests", "4", "--input", "10-20", "--answer", "3")
    code, out, _ = cli(*target, *flags, "--at-once")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("nano-llama")
    assert lines[1] == "all at once, 10-20 tokens in, 3 out"
    titles, figures = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[-3], lines[-1])
    )
    assert titles == ["steps", "busy s", "idle between steps, s", "idle", "preempted"]
    assert int(figures[0]) >= 3
    assert figures[3].endswith("%")
