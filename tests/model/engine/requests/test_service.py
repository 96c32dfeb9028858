"""Many requests at once: each answer is the one that it would be alone."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.patience import PATIENCE, wait_for
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.async_service import AsyncAnswers, AsyncService
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import BusyError, ConstraintError, ContextFullError, ModelError
from urdir.model.owner import Owner
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.text.constraints import Constraint
from urdir.model.text.matcher import ConstraintCompiler, Matcher

DEMO = Path(__file__).parents[3] / "data" / "demo" / "eval.jsonl"
GREEDY = SamplingSettings(temperature=0.0)
CONSTRAINED = Request(
    prompt=(5, 6, 7),
    settings=GREEDY,
    constraint=Constraint.choice(["yes, of course", "certainly not"]),
)
DRAWN = SamplingSettings(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=11)


class Collected:
    """The items of one answer; `ended` waits for the last."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.text = ""
        self.tokens: list[int] = []
        self.last: Ending | Exception | None = None

    def deliver(self, item: Item) -> None:
        self._items.put(item)

    def ended(self) -> Ending | Exception:
        while self.last is None:
            item = self._items.get(timeout=250)
            if isinstance(item, Piece):
                self.text += item.text
                self.tokens += [choice.token for choice in item.choices]
            else:
                self.last = item
        return self.last


def ask(service: Service, request: Request) -> Collected:
    collected = Collected()
    service.submit(request, collected.deliver)
    return collected


def cancel_once(service: Service, made: SimpleQueue[Answer], item: Item) -> None:
    """Cancel an answer by its first item, which may come before `submit` has returned it."""
    answer = made.get(timeout=PATIENCE)
    service.cancel(answer)
    made.put(answer)  # for what comes with it


def is_idle(service: Service) -> bool:
    metrics = service.metrics()
    return (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)


@pytest.fixture(scope="module")
def questions(device_name: str, request: pytest.FixtureRequest) -> list[tuple[list[int], str]]:
    """Prompts and answers: all there are on a GPU, the shortest ones on the emulator."""
    read = [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]
    read.sort(key=lambda q: len(json.dumps(q["messages"])) + len(str(q["expected"])))
    few = device_name == "emulator" and not request.config.getoption("--full")
    with (
        Engine.open(device="emulator") as engine,
        ChatTemplate.of(engine.file, engine.tokenizer) as template,
    ):
        return [
            (template.encode([Message(m["role"], m["content"]) for m in q["messages"]]), answer)
            for q in (read[:2] if few else read)
            if (answer := str(q["expected"])) and q["id"] != "who_has-3"
        ]


@pytest.fixture(scope="module")
def engine(
    device_name: str, needs_gpus: Callable[[int], None], request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """Of few pages: not all sequences become long at once. On one device, or as many as asked."""
    gpus = getattr(request, "param", None)
    needs_gpus(gpus or 1)
    few: Any = {"sequences": 6, "page_len": 16, "pages": 36}
    with Engine.open(device=device_name, gpus=gpus, text=True, **few) as opened:
        yield opened


on_one_and_two = pytest.mark.parametrize(
    "engine", [None, pytest.param(2, marks=pytest.mark.full)], indirect=True, ids=["one", "two"]
)


@pytest.mark.slow
@on_one_and_two
def test_answers_are_those_of_one_at_a_time(
    engine: Engine, questions: list[tuple[list[int], str]]
) -> None:
    """At random times, beside some that are cancelled."""
    rng = random.Random(3)
    with Service(engine, engine.tokenizer) as service:
        asked, cancelled = [], []
        for prompt, _ in questions:
            request = Request(prompt=tuple(prompt), settings=GREEDY, limit=200)
            asked.append(ask(service, request))
            if rng.random() < 0.4:
                left = Collected()
                cancelled.append((service.submit(request, left.deliver), left))
            if rng.random() < 0.3:
                threading.Event().wait(rng.random() * 0.05)
        for answer, _ in cancelled:
            service.cancel(answer)
        for (prompt, expected), collected in zip(questions, asked, strict=True):
            ending = collected.ended()
            assert isinstance(ending, Ending), ending
            assert (collected.text, ending.finish) == (expected, Finish.END)
            assert ending.prompt_tokens == len(prompt)
        wait_for(lambda: is_idle(service))  # those that were cancelled end, too


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_64_at_once_in_a_small_pool(
    device_name: str, questions: list[tuple[list[int], str]]
) -> None:
    """Some are cancelled by their first token, some go on beyond the end of their answer, for which
    others are set back, and the last come at random times."""
    rng, gate = random.Random(3), threading.Event()
    asked, longer = [], []
    few: Any = {"sequences": 64, "page_len": 16, "pages": 48}
    with Engine.open(device=device_name, text=True, **few) as engine:
        usual = Limits.for_latency(engine.session.shapes)
        limits = replace(usual, ahead=1, wait_seconds=1000.0)
        with Service(engine, engine.tokenizer, limits) as service:
            first = Request(prompt=(1,), settings=GREEDY, limit=1)
            service.submit(first, lambda _: gate.wait(250))  # until 64 others are there
            for number, (prompt, _) in enumerate(questions):
                if number >= 64:
                    gate.set()
                    time.sleep(rng.random() * 0.05)
                request = Request(prompt=tuple(prompt), settings=GREEDY, limit=200)
                asked.append(ask(service, request))
                if number % 4 == 1:
                    made = SimpleQueue[Answer]()
                    made.put(service.submit(request, partial(cancel_once, service, made)))
                if number % 8 == 3:
                    longer.append(ask(service, replace(request, limit=90, ignore_end=True)))
            for (_, expected), collected in zip(questions, asked, strict=True):
                ending = collected.ended()
                assert isinstance(ending, Ending), ending
                assert (collected.text, ending.finish) == (expected, Finish.END)
            for (_, expected), collected in zip(questions[3::8], longer, strict=True):
                collected.ended()
                assert len(collected.tokens) == 90
                assert collected.text.startswith(expected)
            assert service.metrics().preemptions > 0
            wait_for(lambda: is_idle(service))
    assert len(questions) > 64


@on_one_and_two
def test_settings_are_each_request_s_own(engine: Engine) -> None:
    """Greedy beside drawn ones, stop strings, limits, log-probabilities, constraints, and a seed
    that gives the same whatever else runs."""
    tokenizer = engine.tokenizer
    prompt = tuple(tokenizer.encode("By the old mill"))
    drawn_alone = Request(prompt=prompt, settings=DRAWN, limit=8)
    alone = "".join(engine.generation(drawn_alone).text())
    with Service(engine, tokenizer) as service:
        likely = SamplingSettings(temperature=0.0, logprobs=3)
        plain = ask(service, Request(prompt=prompt, settings=GREEDY, limit=8))
        drawn = ask(service, Request(prompt=prompt, settings=DRAWN, limit=8))
        wanted: list[Item] = []
        done = threading.Event()

        def note(item: Item) -> None:
            wanted.append(item)
            if not isinstance(item, Piece):
                done.set()

        service.submit(Request(prompt=prompt, settings=likely, limit=4), note)
        choice = Constraint.choice(["yes, of course", "no"])
        chosen = ask(service, Request(prompt=prompt, settings=DRAWN, limit=20, constraint=choice))
        for collected in (plain, drawn):
            ending = collected.ended()
            assert isinstance(ending, Ending), ending
            assert (ending.finish, ending.generated_tokens) == (Finish.LENGTH, 8)
        assert drawn.text == alone
        assert done.wait(250)
        *pieces, ending = wanted
        choices = [c for piece in pieces if isinstance(piece, Piece) for c in piece.choices]
        assert [c.token for c in choices] == plain.tokens[:4]
        for c in choices:
            assert c.logprob == c.top[0][1] == max(p for _, p in c.top) <= 0
            assert c.top[0][0] == c.token
            assert len(c.top) == 3
        chosen.ended()
        assert chosen.text in ("yes, of course", "no")
        stop = plain.text.strip()[6:9]
        stopped = ask(service, Request(prompt=prompt, settings=GREEDY, limit=8, stops=(stop,)))
        ending = stopped.ended()
        assert isinstance(ending, Ending)
        assert (ending.finish, ending.stopped_by) == (Finish.STOP, stop)
        assert plain.text.startswith(stopped.text + stop)


def test_what_cannot_be_served_is_refused(engine: Engine) -> None:
    few = replace(Limits.for_latency(engine.session.shapes), queue=1)
    begins, gate = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        begins.set()
        gate.wait(PATIENCE)  # until the others are there

    with Service(engine, engine.tokenizer, few) as service:
        tokens = tuple(range(10, 10 + 100)) * 6
        assert isinstance(ask(service, Request(prompt=tokens)).ended(), ContextFullError)
        first = Request(prompt=(5,), settings=GREEDY, limit=1)
        service.submit(first, hold)
        assert begins.wait(PATIENCE)  # it has left the queue
        begun = [ask(service, Request(prompt=(5, n), settings=GREEDY, limit=3)) for n in range(12)]
        gate.set()
        ends = [type(collected.ended()) for collected in begun]
        assert BusyError in ends
        assert Ending in ends
        with pytest.raises(ModelError, match="invalid regex"):
            service.submit(
                Request(prompt=(5,), constraint=Constraint.regex("(")), Collected().deliver
            )


def test_a_step_that_fails_ends_its_requests_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, failures = engine.session.queue.launch, [1]

    def failing(*args: Any, **more: Any) -> None:
        if failures:
            failures.pop()
            raise ModelError("no such luck")
        launch(*args, **more)

    monkeypatch.setattr(engine.session.queue, "launch", failing)
    with Service(engine, engine.tokenizer) as service:
        request = Request(prompt=(5, 6, 7), settings=GREEDY, limit=2)
        assert str(ask(service, request).ended()) == "no such luck"
        assert isinstance(ask(service, request).ended(), Ending)
        assert service.metrics().pages_used == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_constraint_that_fails_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At its third token. Beside it another with the same constraint goes on, and so do later
    ones."""
    works, calls = getattr(Matcher, method), Counter[Matcher]()

    def failing(matcher: Matcher, argument: Any) -> None:
        calls[matcher] += 1
        if matcher is next(iter(calls)) and calls[matcher] == 3:
            raise ConstraintError("no more states")
        works(matcher, argument)

    with Service(engine, engine.tokenizer) as service:
        expected = ask(service, CONSTRAINED)
        assert isinstance(expected.ended(), Ending)
        monkeypatch.setattr(Matcher, method, failing)
        failed, beside = ask(service, CONSTRAINED), ask(service, CONSTRAINED)
        plain = ask(service, Request(prompt=(5, 6, 7), settings=GREEDY, limit=4, ignore_end=True))
        assert str(failed.ended()) == "no more states"
        for answer in (beside, plain, later := ask(service, CONSTRAINED)):
            assert isinstance(answer.ended(), Ending)
        assert beside.text == later.text == expected.text
        assert expected.text.startswith(failed.text)
        metrics = service.metrics()
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)


def test_hostile_constraints_end_their_requests_alone(engine: Engine) -> None:
    """One takes too long to compile, and one at its ninth token; plain answers go on beside them,
    and good constraints after them."""
    endless = Constraint.json_schema(
        {"allOf": [{"type": "string", "pattern": f".*{c}.{{20}}"} for c in "abcdefghijklmnopqrst"]}
    )
    patterns = " & ".join(f"/.*[^{c}].{{5}}/" for c in "abcdefghijklmnopqrstuvwx")
    late = Constraint.lark(f'start: A\nA: /x{{10}}/ ("ok" | B)\nB: {patterns}')
    with Service(engine, engine.tokenizer) as service:
        plain = ask(service, Request(prompt=(5, 6, 7), limit=8, ignore_end=True))
        with pytest.raises(ConstraintError, match="to be compiled"):
            ask(service, Request(prompt=(5,), constraint=endless))
        failed = ask(service, Request(prompt=(5,), settings=GREEDY, constraint=late))
        beside = ask(service, CONSTRAINED)
        assert "for a token" in str(failed.ended())
        assert failed.text == "x" * len(failed.text)
        for answer in (plain, beside, later := ask(service, CONSTRAINED)):
            assert isinstance(answer.ended(), Ending)
        assert later.text == beside.text in ("yes, of course", "certainly not")
        metrics = service.metrics()
    assert (metrics.queued, metrics.running, metrics.pages_used) == (0, 0, 0)


@pytest.mark.full
@pytest.mark.slow
def test_constrained_answers_after_a_step_that_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had begun end with the error; those that wait are as good as new."""
    launch, launches = engine.session.queue.launch, 0

    def failing(*args: Any, **more: Any) -> None:
        nonlocal launches
        if (launches := launches + 1) == 3:
            raise ModelError("no such luck")
        launch(*args, **more)

    with Service(engine, engine.tokenizer) as service:
        expected = ask(service, CONSTRAINED)
        assert isinstance(expected.ended(), Ending)
        monkeypatch.setattr(engine.session.queue, "launch", failing)
        asked = [ask(service, CONSTRAINED) for _ in range(engine.session.sequences + 2)]
        ends = [answer.ended() for answer in asked]
        for answer, end in zip(asked, ends, strict=True):
            if isinstance(end, Ending):
                assert answer.text == expected.text
            else:
                assert str(end) == "no such luck"
        assert {type(end) for end in ends} == {Ending, ModelError}


def test_many_prompts_in_one_line(engine: Engine) -> None:
    """In their order; before and after, the engine answers one."""
    prompts = ["By the old mill", "What is", "By the old mill"]
    alone = [engine.generate(prompt, settings=GREEDY, limit=3) for prompt in prompts[:2]]
    together = list(engine.generate_all(prompts, settings=GREEDY, limit=3))
    assert [str(made) for made in together] == [*alone, alone[0]]
    assert [len(made.choices) for made in together] == [3, 3, 3]
    assert {made.ending.finish for made in together} == {Finish.LENGTH}
    for bad in ("", "word " * 999):  # found before the first step, and by the scheduler
        with pytest.raises(ModelError) as caught:
            list(engine.generate_all(["a", bad], settings=GREEDY, limit=1))
        assert caught.value.__notes__ == ["prompts[1]"]
    assert engine.generate(prompts[0], settings=GREEDY, limit=3) == alone[0]


class Nothing(Owner):
    def close(self) -> None:
        pass


@pytest.mark.full
@pytest.mark.slow
def test_answers_are_asynchronous_iterators(device_name: str) -> None:
    """Many at once, in one event loop; a closed iterator is cancelled."""

    async def text_of(service: AsyncService[Nothing], request: Request) -> str:
        return "".join(
            [item.text async for item in service.generate(request) if isinstance(item, Piece)]
        )

    async def run() -> tuple[list[str], int]:
        engine = Engine.open(device=device_name, sequences=3, page_len=16, context=128)
        prompt = tuple(engine.tokenizer.encode("By the old mill"))
        service = AsyncService(engine, Nothing())
        request = Request(prompt=prompt, settings=GREEDY, limit=6)
        closed = service.generate(Request(prompt=prompt, settings=GREEDY))
        assert isinstance(await anext(closed), Piece)
        await closed.aclose()
        texts = await asyncio.gather(*(text_of(service, request) for _ in range(4)))
        with pytest.raises(ContextFullError):
            await anext(service.generate(Request(prompt=(5,) * 200)))
        await service.drain()
        running = (await service.metrics()).running
        await service.close()
        return texts, running

    texts, running = asyncio.run(run())
    assert len(set(texts)) == 1
    assert texts[0]
    assert running == 0


def test_the_event_loop_goes_on_while_a_constraint_is_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = ConstraintCompiler.matcher

    rounds = [0]  # of the event loop
    goes_on = []

    def slowly(*args: Any) -> Matcher:
        end, before = time.monotonic() + PATIENCE, rounds[0]
        while rounds[0] < before + 5 and time.monotonic() < end:
            time.sleep(0.01)
        goes_on.append(rounds[0] >= before + 5)
        return compiled(*args)

    monkeypatch.setattr(ConstraintCompiler, "matcher", slowly)

    async def run() -> Piece | Ending:
        answers = AsyncAnswers(engine)
        try:
            task = asyncio.ensure_future(anext(answers.generate(CONSTRAINED)))
            while not task.done():
                await asyncio.sleep(0.01)
                rounds[0] += 1
            return task.result()
        finally:
            await answers.close()

    assert isinstance(asyncio.run(run()), Piece)
    assert goes_on == [True]
