"""A service under load: memory of process and device flat, no page lost, no wrong answer.

On a GPU for ``--soak SECONDS`` (600) with ``--full``, otherwise a few: `serve/test_soak.py` does so
on the emulator, through HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import ContextFullError
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.text.chat import Message
from urdir.model.text.constraints import Constraint

QUESTIONS = Path(__file__).parents[3] / "data" / "demo" / "eval.jsonl"
#: Seconds where no more are asked for.
SHORT = 3
#: Bytes that the process, or what is used of the device, may grow by in the last third of the time.
#: The driver counts what all processes use of a GPU, so that is judged where one process tests.
GROWTH = 128 << 20

GREEDY = SamplingSettings(temperature=0.0)
ONE_OR_TWO = Constraint.json_schema(
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
)


@dataclass
class Question:
    prompt: tuple[int, ...]
    expected: str


@dataclass
class Load:
    """Users who ask one question after another until ``end``, and what came of it."""

    service: AsyncService[Any]
    questions: list[Question]
    end: float
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[object] = field(default_factory=list)

    async def run(self, users: int, note: Callable[[], None]) -> None:
        """``note`` is called every second."""
        tasks = [asyncio.create_task(self._user()) for _ in range(users)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1)
            note()
        await asyncio.gather(*tasks)

    async def _user(self) -> None:
        ways = (self._ask, self._go_on, self._leave, self._constrain, self._ask_too_much)
        while time.monotonic() < self.end:
            way = self.rng.choices(ways, (10, 2, 3, 1, 1))[0]
            self.counts[way.__name__] += 1
            await way(self.rng.choice(self.questions))

    async def _answer(self, request: Request, most: int = 1 << 30) -> tuple[str, Ending | None]:
        """The text and its end; of ``most`` pieces, after which the user leaves."""
        text = ""
        async with aclosing(self.service.generate(request)) as items:
            async for item in items:
                if isinstance(item, Ending):
                    return text, item
                text += item.text
                if (most := most - 1) <= 0:
                    break
        return text, None

    async def _ask(self, question: Question) -> None:
        request = Request(prompt=question.prompt, settings=GREEDY)
        text, ending = await self._answer(request)
        if text != question.expected or ending is None or ending.finish is not Finish.END:
            self.wrong.append((question.expected, text, ending))

    async def _go_on(self, question: Question) -> None:
        """Beside others of its kind, for more than there are pages for."""
        request = Request(prompt=question.prompt, settings=GREEDY, limit=90, ignore_end=True)
        _, ending = await self._answer(request)
        if ending is None or ending.finish is not Finish.LENGTH or ending.generated_tokens != 90:
            self.wrong.append(("90 tokens", ending))

    async def _leave(self, question: Question) -> None:
        await self._answer(Request(prompt=question.prompt, settings=GREEDY), self.rng.randint(1, 6))

    async def _constrain(self, question: Question) -> None:
        request = Request(prompt=question.prompt, settings=GREEDY, limit=120, constraint=ONE_OR_TWO)
        text, ending = await self._answer(request)
        if ending is None or ending.finish is Finish.LENGTH:
            return  # spaces without end
        with suppress(ValueError):
            if json.loads(text)["a"] in (1, 2):
                return
        self.wrong.append(("a is 1 or 2", text))

    async def _ask_too_much(self, question: Question) -> None:
        with pytest.raises(ContextFullError):
            await self._answer(Request(prompt=question.prompt * 400))


@pytest.fixture(params=[None, DraftSettings(most=3, least=1)], ids=["plain", "drafts"])
def engine(device_name: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Of few pages: not all sequences become long at once."""
    size = (
        {"sequences": 24, "pages": 150} if device_name == "cuda" else {"sequences": 4, "pages": 14}
    )
    options: dict[str, Any] = {"device": device_name, "text": True, "drafts": request.param}
    with Engine.open(page_len=16, **options, **size) as opened:
        yield opened


@pytest.fixture
def questions(engine: Engine) -> list[Question]:
    """Those that a half of the pages hold."""
    most = engine.session.parts.cache.pools[0].pages * 16 // 2
    found = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        read = json.loads(line)
        asked = [Message(m["role"], m["content"]) for m in read["messages"]]
        prompt, expected = tuple(engine.template.encode(asked)), str(read["expected"])
        length = len(prompt) + len(engine.tokenizer.encode(expected))
        if expected and length < most and read["id"] != "who_has-3":
            found.append(Question(prompt, expected))
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_grows_and_nothing_is_wrong(
    engine: Engine, questions: list[Question], device_name: str, pytestconfig: pytest.Config
) -> None:
    is_long = device_name == "cuda" and pytestconfig.getoption("--full")
    seconds = pytestconfig.getoption("--soak") if is_long else SHORT
    limits = replace(Limits.for_latency(engine.session.shapes), wait_seconds=3600)
    memory: list[tuple[int, int]] = []

    def note() -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        free, total = engine.device.memory_info()
        memory.append((resident, total - free))

    async def run() -> tuple[Load, Any]:
        service = AsyncService(engine, None, limits)
        try:
            load = Load(service, questions, time.monotonic() + seconds)
            await load.run(engine.session.sequences * 3 // 2, note)
            await service.drain()
            await until_idle(service)
            return load, await service.metrics()
        finally:
            await service.close()

    load, metrics = asyncio.run(run())
    late = len(memory) * 2 // 3
    growth = [max(kind[late:]) - max(kind[:late]) for kind in zip(*memory, strict=True)]
    print(f"{load.counts}, process and device grew by {growth} of {max(memory)}, {metrics}")
    assert load.wrong == []
    assert load.counts["_ask"] > 0
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)
    is_alone = device_name != "cuda" or os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
    assert max(growth if is_alone else growth[:1]) < GROWTH


async def until_idle(service: AsyncService[Any]) -> None:
    """Requests whose users have left end soon after."""
    end = time.monotonic() + PATIENCE
    while (now := await service.metrics()).running or now.queued:
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)
