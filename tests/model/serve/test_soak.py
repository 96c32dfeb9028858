"""A server under load for minutes, on the emulator: memory flat, no page lost, no wrong answer.

``--soak SECONDS`` says for how long (600). `python -m tests.model.serve.soak` is the second test,
which prints what every process holds after each minute.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from tests.model.serve import soak
from tests.model.serve.soak_held import Held, Round, growth
from tests.model.serve.soak_load import CONTEXT, Load
from urdir.driver import bindings
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.measure.http_events import HttpServer
from urdir.model.serve.interface import Defaults
from urdir.model.serve.served_model import EngineModel


@pytest.mark.full
@pytest.mark.timeout(0)
def test_no_page_is_lost_and_nothing_is_wrong(
    run_server: Callable[..., AbstractContextManager[Any]],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    """With fewer pages than its clients ask for."""
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
            load = Load(HttpServer.parse(server.url))
            asyncio.run(load.run(pytestconfig.getoption("--soak")))
            server.wait_for(lambda: asyncio.run(service.metrics()).running == 0)
        metrics = asyncio.run(service.metrics())
    finally:
        asyncio.run(service.close())
    print(f"{load.counts}, {metrics}")
    assert load.wrong == []
    assert all(load.counts[way] > 0 for way in ("answer", "to_the_end", "vanish", "hostile"))
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    gc.collect()
    assert api.live() == {}


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "flags", [["--api-workers", "0"], ["--api-workers", "2"], ["--random-steps"]]
)
def test_nothing_grows(flags: list[str], pytestconfig: pytest.Config) -> None:
    """Without steps only the code of the host works."""
    seconds = pytestconfig.getoption("--soak")
    times = ["--seconds", str(seconds), "--warm-up", str(seconds / 3)]
    assert soak.main([*times, *flags]) == 0


def rounds_of(values: Sequence[int], blocks: Sequence[int] = (), **more: int) -> list[Round]:
    """Rounds of a minute: an engine that takes these MB, beside a process that takes 30."""
    held = Held(30 << 20, 7, 3, 1, 0)
    counts = blocks or [0] * len(values)
    made = [replace(held, bytes=mb << 20, blocks=n) for mb, n in zip(values, counts, strict=True)]
    made[-1] = replace(made[-1], **more)
    return [Round(at / 60, {1: each, 2: held}) for at, each in enumerate(made)]


def test_growth_is_found() -> None:
    flat = [200, 201, 199] * 4
    assert growth(rounds_of(flat)) == []
    assert growth(rounds_of(flat, tasks=9)) == ["process 1: 1 tasks, then 9"]
    assert growth(rounds_of([200 + at for at in range(12)])) == []  # a few more MB
    (found,) = growth(rounds_of([200 + 5 * at for at in range(12)]))
    assert found == "process 1: +314.6 MB an hour, give or take 0.0"
    assert "rounds say nothing" in growth(rounds_of(flat[:5]))[0]


def test_kernels_that_the_emulator_compiles_are_no_growth() -> None:
    grown, compiled = [200 + 10 * at for at in range(12)], [*range(12)]
    (found,) = growth(rounds_of(grown, compiled))
    assert "no verdict" in found
    assert growth(rounds_of([200] * 6 + [200] * 3 + [260] * 3, [0] * 9 + [1] * 3)) == []
    some = [0, 0, 3, 5, 5, 5, 6, 7, 7, 9, 9, 10]  # of 20 MB each
    assert growth(rounds_of([200 + 20 * n for n in some], some)) == []
    (found,) = growth(rounds_of([200 + 20 * n + 5 * at for at, n in enumerate(some)], some))
    assert "process 1: +314.6 MB an hour" in found


def test_rounds_that_differ_too_much_tell_nothing() -> None:
    (found,) = growth(rounds_of([200, 900, 200] * 4))
    assert "process 1: no verdict, " in found
