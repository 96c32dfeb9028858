"""Answers of an engine for asyncio: streamed, together, cancelled, and the engine given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ContextFullError, ModelError

PROMPTS = ("By the old mill", "What is", "Red")
GREEDY = SamplingSettings(temperature=0.0)


@pytest.fixture(scope="module")
def engine(device_name: str) -> Iterator[Engine]:
    with Engine.open(device=device_name, sequences=2, context=64, page_len=16) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[str]:
    """What the engine answers to each prompt by itself."""
    return [engine.generate(prompt, settings=GREEDY, limit=3) for prompt in PROMPTS]


def ask(engine: Engine, prompt: str, limit: int = 3) -> AsyncGenerator[Piece | Ending, None]:
    return engine.generate_async(prompt, settings=GREEDY, limit=limit)


async def whole(items: AsyncGenerator[Piece | Ending, None]) -> tuple[str, Ending]:
    async with aclosing(items) as opened:
        *pieces, ending = [item async for item in opened]
    assert isinstance(ending, Ending)
    texts = [piece.text for piece in pieces if isinstance(piece, Piece)]
    assert len(texts) == len(pieces) > 0  # joined, where a device is ahead of the reader
    return "".join(texts), ending


@pytest.mark.slow
def test_answers_come_in_pieces_and_are_those_of_one_at_a_time(
    engine: Engine, alone: list[str]
) -> None:
    """More of them than sequences; afterwards the engine, and another loop, go on."""

    async def run() -> list[tuple[str, Ending]]:
        return await asyncio.gather(*(whole(ask(engine, prompt)) for prompt in PROMPTS))

    found = asyncio.run(run())
    assert [text for text, _ in found] == alone
    for _, ending in found:
        assert (ending.finish, ending.generated_tokens) == (Finish.LENGTH, 3)
    assert engine.generate(PROMPTS[0], settings=GREEDY, limit=3) == alone[0]
    assert asyncio.run(whole(ask(engine, PROMPTS[0])))[0] == alone[0]


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("how", ["the iterator is closed", "the task is cancelled"])
def test_who_goes_away_cancels_his_request_alone(
    engine: Engine, alone: list[str], how: str
) -> None:
    """One without a limit of tokens would take the whole context."""

    async def first_piece(begun: asyncio.Event) -> None:
        async with aclosing(engine.generate_async(PROMPTS[0], settings=GREEDY)) as items:
            async for _ in items:
                begun.set()
                if how == "the iterator is closed":
                    return
                if (task := asyncio.current_task()) is not None:
                    task.cancel()  # at its next wait, or at its end

    async def run() -> str:
        begun = asyncio.Event()
        leaving = asyncio.create_task(first_piece(begun))
        staying = asyncio.create_task(whole(ask(engine, PROMPTS[1])))
        await begun.wait()
        await asyncio.wait([leaving])
        assert leaving.cancelled() is (how == "the task is cancelled")
        text, _ = await staying
        return text

    assert asyncio.run(run()) == alone[1]
    assert engine.generate(PROMPTS[0], settings=GREEDY, limit=3) == alone[0]


@pytest.mark.slow
def test_an_engine_that_is_in_use_says_so(engine: Engine, alone: list[str]) -> None:
    async def run() -> None:
        items = ask(engine, PROMPTS[0])
        await anext(items)
        with pytest.raises(ModelError, match="in use"):
            engine.generate(PROMPTS[1])
        await items.aclose()
        generation = engine.generation(Request(prompt=(5, 6, 7), settings=GREEDY)).pieces()
        next(generation)
        with pytest.raises(ModelError, match="in use"):
            await anext(ask(engine, PROMPTS[0]))
        generation.close()
        with pytest.raises(ContextFullError):
            await anext(engine.generation_async(Request(prompt=(5,) * 100)))
        assert (await whole(ask(engine, PROMPTS[2])))[0] == alone[2]

    asyncio.run(run())
