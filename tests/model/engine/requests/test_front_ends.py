"""Front ends apart: what a seed draws is what it draws in one process, whichever front end asks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.model.engine.test_recurrent_together import Opened, patient
from urdir.model.engine.requests.answering import Answering
from urdir.model.engine.requests.async_service import AsyncAnswers
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request, TokenChoice
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.serve.apart.desks import Desks
from urdir.model.serve.apart.link import EngineLink
from urdir.model.serve.kept import Store

DRAWN = SamplingSettings(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, logprobs=2)
SEEDS = (3, (1 << 64) - 1, 3, 17)
LIMIT = 6


async def _answers(fronts: list[Answering[Any]]) -> list[tuple[TokenChoice, ...]]:
    """Of a request for each seed, one after the other, from the front ends in turn."""
    found = []
    for number, seed in enumerate(SEEDS):
        settings = replace(DRAWN, seed=seed)
        request = Request(prompt=(5, 6, 7), settings=settings, limit=LIMIT, ignore_end=True)
        async with aclosing(fronts[number % len(fronts)].generate(request)) as items:
            *pieces, ending = [item async for item in items]
        assert isinstance(ending, Ending)
        assert (ending.finish, ending.generated_tokens) == (Finish.LENGTH, LIMIT)
        found.append(sum((cast(Piece, piece).choices for piece in pieces), ()))
    return found


@contextmanager
def _connections(desks: Desks, count: int) -> Iterator[list[socket.socket]]:
    """Those of so many front ends to the engine's ``desks``."""
    with ExitStack() as owners:
        theirs = []
        for _ in range(count):
            ours, other = socket.socketpair()
            theirs.append(owners.enter_context(other))
            desks.open(ours)
        yield theirs


@pytest.mark.slow
def test_a_seed_draws_the_same_tokens_with_front_ends_apart(session: Session) -> None:
    """With the same log-probabilities."""
    opened = Opened(session, None)

    async def in_one_process() -> list[tuple[TokenChoice, ...]]:
        answers = AsyncAnswers(opened, patient(session))
        try:
            return await _answers([answers])
        finally:
            await answers.close()

    async def apart(connections: list[socket.socket]) -> list[tuple[TokenChoice, ...]]:
        links = [await EngineLink.connect(None, each) for each in connections]
        found = await _answers([*links])
        for link in links:
            await link.close()
        return found

    wanted = asyncio.run(in_one_process())
    with (
        Desks(Store(0, 0.0)) as desks,
        Service(opened, None, patient(session), desks.post) as service,
        _connections(desks, 2) as connections,
    ):
        desks.start(service)
        assert asyncio.run(apart(connections)) == wanted
    assert wanted[0] == wanted[2]
    assert len(set(wanted)) == 3
    assert all(len(choices) == LIMIT for choices in wanted)
    assert all(len(choice.top) == 2 for choices in wanted for choice in choices)
