"""Calls and rounds between the processes of a server: frames, order, what is read late."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.patience import PATIENCE
from urdir.model.engine.requests.request import Piece, Request, TokenChoice
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.memory.scored_rows import TokenScores
from urdir.model.serve.apart import desks as apart_desks
from urdir.model.serve.apart import supervisor, wire
from urdir.model.serve.apart.desks import Desks
from urdir.model.serve.apart.link import EngineLink
from urdir.model.serve.kept import Store
from urdir.model.serve.loops import run_in_loop
from urdir.model.text.constraints import Constraint
from urdir.model.text.thought_limit import ThoughtLimit


def test_a_signal_after_the_greeting_is_an_order() -> None:
    """Before it, one ends the processes at once: nothing is open."""
    control, theirs = multiprocessing.Pipe()
    signals = supervisor._Signals(control, lambda *_: signals.take(signal.SIGTERM, None))
    with pytest.raises(KeyboardInterrupt):
        signals.take(signal.SIGTERM, None)
    for said in (("toy", 512), None):
        theirs.send(said)
    signals.wait(multiprocessing.Process())
    assert theirs.recv() == "drain"


def test_an_error_of_the_greeting_is_no_end_of_the_engine() -> None:
    """Its reader may have gone: no end of the engine is awaited."""

    def greet(name: str, context: int) -> None:
        raise BrokenPipeError

    control, theirs = multiprocessing.Pipe()
    theirs.send(("toy", 512))
    with pytest.raises(BrokenPipeError):
        supervisor._Signals(control, greet).wait(multiprocessing.Process())


def test_an_order_with_the_first_round_is_remembered() -> None:
    """Nothing hears it yet."""

    async def run() -> tuple[int, bool | None]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await EngineLink.connect(None, ours)
            rounds = [wire.Round(context=64), wire.Round(order="abort")]
            theirs.sendall(b"".join(map(wire.frame, rounds)))
            context = await link.context
        await asyncio.sleep(0.01)  # the end of the connection is no order to drain
        return context, link.ordered

    assert asyncio.run(run()) == (64, True)


def test_the_engine_hears_of_a_request_that_begins_to_arrive() -> None:
    """Once it has a model, and unless another is open: it is busy then anyway."""

    async def run() -> list[wire.Call]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await EngineLink.connect(None, ours)
            link.expect()
            link.begin_with(cast(Any, "a model"))
            link.expect()
            answer = link.generate(Request(prompt=(1,), limit=1))
            first = asyncio.ensure_future(anext(answer))
            await asyncio.sleep(0)
            link.expect()
            theirs.sendall(wire.frame(wire.Round([wire.Update(0, (5,))])))
            await first
            await answer.aclose()
            link.expect()
            theirs.setblocking(False)
            return [*map(wire.decode_call, wire.Frames().push(theirs.recv(1 << 16)))]

    kinds = [type(call) for call in asyncio.run(run())]
    assert kinds == [wire.Ready, wire.Expect, wire.Ask, wire.Cancel, wire.Expect]


def test_calls_are_whole_and_in_order_however_late_they_are_read() -> None:
    """Some are sent at once, some once there is room."""

    async def run() -> list[wire.Call]:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
        theirs.setblocking(False)
        with theirs:
            link = await EngineLink.connect(None, ours)
            link.begin_with(cast(Any, "a model"))
            frames, found, sent = wire.Frames(), list[wire.Call](), 0

            def read(most: int) -> None:
                with suppress(BlockingIOError):
                    found.extend(map(wire.decode_call, frames.push(theirs.recv(most))))

            while len(found) < 1 + 60:
                for _ in range(3 if sent < 60 else 0):
                    scope = bytes(30_000 * (sent % 3))
                    await link._begin(Request(prompt=(1, sent), limit=1, scope=scope), print)
                    sent += 1
                    read(20_000)
                await asyncio.sleep(0.001 * (sent % 2))
                read(3000)
        return found

    _, *calls = run_in_loop(run())
    assert [call.prompt for call in calls if isinstance(call, wire.Ask)] == [
        (1, number) for number in range(60)
    ]


def test_what_is_unsent_follows() -> None:
    """Whichever thread sent it; nothing is sent once all is closed."""
    engine: Any = None  # no calls
    ours, theirs = socket.socketpair()
    rounds = [wire.Round([wire.Update(number, tuple(range(100_000)))]) for number in range(20)]
    with theirs, Desks(Store(0, 0.0)) as desks:
        theirs.settimeout(PATIENCE)
        desk = desks.open(ours)
        desks.start(engine)
        for each in rounds:
            desk.send(each)
        frames, found = wire.Frames(), []
        while len(found) < len(rounds):
            found += map(wire.decode_round, frames.push(theirs.recv(1 << 18)))
    assert found == rounds
    desk.send(rounds[0])
    desks.order("drain")
    desks.close()


class Looking:
    """An idle service, whose thread looks for the request that it expects; ``read_by`` are the
    threads that read requests."""

    def __init__(self) -> None:
        self.read_by: list[str] = []
        self.looks = threading.Event()

    def expect(self, look: Callable[[], bool]) -> bool:
        def run() -> None:
            while not look():
                self.looks.set()

        threading.Thread(target=run, name="service").start()
        return True

    def answer_to(self, *_: object) -> None:
        self.read_by.append(threading.current_thread().name)

    def add(self, _: object) -> None: ...


def test_the_service_itself_reads_a_request_that_it_expects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are read by a thread of their own, which leaves the first one to it."""
    is_read = threading.Event()
    slept: list[float] = []

    def sleep(seconds: float) -> None:  # however busy the machine is
        slept.append(seconds)
        is_read.wait(PATIENCE)

    monkeypatch.setattr(apart_desks, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 5.0))
    monkeypatch.setattr(apart_desks, "_TURN_SECONDS", PATIENCE)
    engine: Any = Looking()
    ours, theirs = socket.socketpair()
    with theirs, Desks(Store(0, 0.0)) as desks:
        desks.open(ours)
        desks.start(engine)
        theirs.sendall(wire.frame(wire.Expect()))
        assert engine.looks.wait(PATIENCE)
        for number in range(2):
            theirs.sendall(wire.frame(wire.Ask.of(number, Request(prompt=(1,)))))
            deadline = time.monotonic() + PATIENCE
            while len(engine.read_by) == number:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            is_read.set()
    assert engine.read_by[0] == "service"
    assert engine.read_by[1] != "service"
    assert slept
    assert slept == pytest.approx([0.003] * len(slept))


def test_requests_arrive_as_they_are() -> None:
    """All of them but what makes text, and processors, which are code of this process."""
    settings = SamplingSettings(seed=(1 << 64) - 1, logit_bias=((5, -1.5), (7, 2.0)), logprobs=3)
    constraint = Constraint.choice(["yes", "nó"])
    request = Request(
        prompt=(1, 2, 1 << 20),
        settings=settings,
        limit=7,
        stops=("a",),
        ignore_end=True,
        constraint=constraint,
        thoughts=ThoughtLimit(5, "<think>", "</think>", "Enough.</think>", is_open=True),
        shown=frozenset({"<b>"}),
        scope=b"\xff\0",
        drafts=False,
        draft_p_min=0.25,
        adapters=(("a", -0.5),),
        source=(3, 1 << 20),
        prompt_logprobs=20,
    )
    unlike = [
        each.name
        for each in fields(Request)
        if each.default is not MISSING and getattr(request, each.name) == each.default
    ]
    assert unlike == ["processors"]  # a new field is to be sent, too
    (body,) = wire.Frames().push(wire.frame(wire.Ask.of(3, request)))
    call = wire.decode_call(body)
    assert isinstance(call, wire.Ask)
    assert call.request == replace(request, stops=(), shown=frozenset())


@pytest.mark.parametrize("likely", [0, 3])
def test_log_probabilities_of_prompts_arrive_as_they_are(likely: int) -> None:
    """Alone, and with tokens."""
    random = np.random.default_rng(likely)
    scores = tuple(
        TokenScores(
            random.normal(size=(rows, 1 + likely)).astype(np.float32),
            random.integers(0, 1 << 20, (rows, likely), np.uint32),
        )
        for rows in (5, 1)
    )
    choice = TokenChoice(7, -0.5, ((7, -0.5),))
    for choices in ((), (TokenChoice(7),), (choice,)):
        update = wire.Update.of(1, Piece("", choices, scores))
        (body,) = wire.Frames().push(wire.frame(wire.Round([update])))
        (piece,) = wire.decode_round(body).updates[0].items()
        assert isinstance(piece, Piece)
        assert piece.choices == choices
        for found, sent in zip(piece.scores, scores, strict=True):
            np.testing.assert_array_equal(found.values, sent.values)
            np.testing.assert_array_equal(found.tokens, sent.tokens)


def test_frames_are_cut_anywhere() -> None:
    calls = [wire.Stop(1), wire.Cancel(2), wire.Query(1 << 40), wire.Ready()]
    data = b"".join(map(wire.frame, calls))
    for size in (1, 3, 7, len(data)):
        frames, found = wire.Frames(), []
        for at in range(0, len(data), size):
            found += map(wire.decode_call, frames.push(data[at : at + size]))
        assert found == calls
