"""One user's answers, one after the other: each is as if alone, whatever became of the last one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.model.stepping import Numbers
from urdir.driver.device import Device
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.realizar import EagerSteps
from urdir.model.engine.requests.launcher import Launcher
from urdir.model.engine.requests.request import Finish, Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.run_ahead import RunAhead
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.engine.step_queue import StepQueue
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

DATA = Path(__file__).parents[2] / "data"
CONTEXT = 24
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def session(device_name: str) -> Iterator[Session]:
    with (
        Device.open(device_name) as device,
        Gguf(DATA / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Weights.load(gguf, replace(Config.of(gguf), context_length=1024), device) as weights,
        Session(device, weights, SessionSettings(CONTEXT, chunk=8)) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def singly(session: Session) -> list[int]:
    """The answer by single steps, as long as the context lets it be."""
    with EagerSteps(session) as eager:
        eager.feed(PROMPT)
        return [eager.step()[0] for _ in range(CONTEXT - len(PROMPT) + 1)]


def forget(session: Session) -> None:
    """Leave nothing of the last answer in the cache."""
    EagerSteps(session).close()


def generation(session: Session, *end_ids: int, **fields: Any) -> Generation:
    request = Request(**{"prompt": PROMPT, "settings": GREEDY} | fields)
    tokenizer: Any = Numbers(*end_ids)
    return Generation(session, tokenizer, request)


@pytest.mark.slow
def test_answers_end_where_they_should(session: Session, singly: list[int]) -> None:
    """The text is that of the tokens; an end token is no part of it, a stop string neither."""
    at = next(n for n in range(4, 14) if singly[n] not in singly[:n])
    stop = f"{singly[at]} "
    for fields, ends, finish, count, text in (
        ({}, (), Finish.FULL, len(singly), singly),
        ({"limit": 6}, (), Finish.LENGTH, 6, singly[:6]),
        ({}, (singly[at],), Finish.END, at, singly[:at]),
        ({"ignore_end": True, "limit": at + 2}, (singly[at],), Finish.LENGTH, at + 2, singly),
        ({"stops": (stop,)}, (), Finish.STOP, at + 1, singly[:at]),
    ):
        made = generation(session, *ends, **fields)
        found = "".join(made.text())
        statistics = made.statistics
        assert found == "".join(f"{token} " for token in text[:count])
        assert made.tokens == singly[:count]
        assert (statistics.finish, statistics.generated_tokens) == (finish, count)
        assert statistics.prompt_tokens == len(PROMPT)
        assert statistics.prompt_seconds > 0
        assert statistics.tokens_per_second > 0


def test_each_token_has_its_text(session: Session, singly: list[int]) -> None:
    choices = [c for piece in generation(session, limit=9).pieces() for c in piece.choices]
    assert [choice.token for choice in choices] == singly[:9]
    assert [choice.text for choice in choices] == [f"{token} " for token in singly[:9]]


@pytest.mark.slow
def test_the_next_turn_goes_on_from_the_last(session: Session, singly: list[int]) -> None:
    """Also from one that was left in the midst, and from steps one at a time."""
    forget(session)
    first = generation(session, limit=6)
    "".join(first.text())
    assert first.statistics.cached_tokens == 0
    longer = generation(session, prompt=(*PROMPT, *singly[:7]), limit=5)
    with closing(longer.text()) as text:
        next(text)
    assert longer.statistics.cached_tokens == len(PROMPT) + 5  # the sixth was not processed
    assert longer.statistics.finish is Finish.INTERRUPTED
    assert longer.tokens == singly[7 : 7 + len(longer.tokens)]
    again = generation(session)
    "".join(again.text())
    assert again.statistics.cached_tokens == len(PROMPT) - 1
    assert again.tokens == singly
    with EagerSteps(session) as eager:
        eager.feed(PROMPT)  # over what the place was left with
        assert [eager.step()[0] for _ in range(3)] == singly[:3]
    last = generation(session, prompt=(*PROMPT, *singly[:2]), limit=5)
    "".join(last.text())
    assert last.statistics.cached_tokens == len(PROMPT) + 1
    assert last.tokens == singly[2:7]


def test_a_prompt_alone_is_kept_for_the_next_answer(session: Session, singly: list[int]) -> None:
    """No token is delivered, not even one that would end the answer."""
    forget(session)
    prompt = (*PROMPT, *singly[:2])
    alone = generation(session, singly[2], prompt=prompt, limit=0)
    assert [*alone.pieces()] == []
    statistics = alone.statistics
    assert (statistics.finish, statistics.generated_tokens) == (Finish.LENGTH, 0)
    last = generation(session, prompt=(*prompt, singly[2]), limit=3)
    "".join(last.text())
    assert last.statistics.cached_tokens == len(prompt)
    assert last.tokens == singly[3:6]


def test_one_answer_is_open_at_a_time(session: Session, singly: list[int]) -> None:
    with closing(generation(session).text()) as text:
        next(text)
        with pytest.raises(ModelError, match="in use: close the answer"):
            next(generation(session).text())
        with pytest.raises(ModelError, match="in use: close the answer"):
            EagerSteps(session)
    assert len("".join(generation(session, limit=2).text()).split()) == 2


def test_what_does_not_fit_is_refused_and_nothing_is_lost(
    session: Session, singly: list[int]
) -> None:
    "".join(generation(session, limit=2).text())
    with pytest.raises(ContextFullError, match=f"{CONTEXT + 2} tokens exceed .* {CONTEXT} by 2"):
        "".join(generation(session, prompt=(1,) * (CONTEXT + 2)).text())
    size = session.parts.config.vocab_size
    biased = replace(GREEDY, logit_bias=((size, 1.0),))
    for fields in ({"prompt": (1, size)}, {"prompt": (-1,)}, {"settings": biased}):
        with pytest.raises(ModelError, match="the vocabulary"):
            "".join(generation(session, **fields).text())
    made = generation(session, limit=2)
    assert "".join(made.text()) == "".join(f"{token} " for token in singly[:2])
    assert made.statistics.cached_tokens == len(PROMPT) - 1


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Scheduler, "plan"),
        pytest.param(Scheduler, "chosen", marks=pytest.mark.full),
        (KvCache, "match"),
        (Launcher, "launch"),
        (StepQueue, "launch"),
        pytest.param(RunAhead, "queued", marks=pytest.mark.full),
        (RunAhead, "wait"),
    ],
)
def test_whatever_ends_an_answer_the_next_is_right(
    session: Session,
    singly: list[int],
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    error: type[BaseException],
) -> None:
    """Ctrl-C or a failure, before and after any part of the work; what is known of the prompt and
    of the answer is gone on from."""
    prompt = (*PROMPT, 7)  # two steps
    expected = "".join(generation(session, prompt=prompt, limit=3).text())
    for nth, is_after in ((1, False), (1, True), (4, False)):
        forget(session)
        calls = iter(range(1, 1000))
        with monkeypatch.context() as patches:
            real = getattr(kind, name)

            def failing(*args: Any, **kwargs: Any) -> Any:
                is_due = next(calls) == nth  # noqa: B023
                if is_due and not is_after:  # noqa: B023
                    raise error
                result = real(*args, **kwargs)  # noqa: B023
                if is_due:
                    raise error
                return result

            patches.setattr(kind, name, failing)
            with pytest.raises(error) if nth == 1 or name != "match" else nullcontext():
                "".join(generation(session, prompt=prompt, limit=6).text())
        assert "".join(generation(session, prompt=prompt, limit=3).text()) == expected


@pytest.mark.slow
def test_leaving_early_waits_for_nothing_else(session: Session, singly: list[int]) -> None:
    """Each of many answers that are left after some pieces is right as far as it went."""
    for count in (1, 2, 5):
        made = generation(session)
        with closing(made.pieces()) as pieces:
            list(islice(pieces, count))
        assert made.tokens == singly[: len(made.tokens)]
        assert len(made.tokens) >= count


def test_a_second_iteration_is_another_answer(session: Session) -> None:
    made = generation(session)
    first = [choice.token for piece in made.pieces() for choice in piece.choices]
    assert made.tokens == first
    assert made.statistics.generated_tokens == len(first) > 0
    second = [choice.token for piece in made.pieces() for choice in piece.choices]
    assert second == made.tokens == first
    assert made.statistics.generated_tokens == len(first)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_answer_ends_in_one_line_after_its_engine(
    data: Path, caplog: pytest.LogCaptureFixture, goes_on: bool
) -> None:
    file = data / "golden" / "nano-llama-q8_0.gguf"
    engine = Engine.open(file, device="emulator", context=CONTEXT, cache_folder=None)
    request = Request(prompt=PROMPT, settings=GREEDY)
    pieces = Generation(engine.session, None, request).pieces()
    list(islice(pieces, 3))  # steps are queued
    engine.close()
    if goes_on:
        with pytest.raises(ModelError, match="the engine is closed"):
            next(pieces)
    pieces.close()
    assert not caplog.records
    with pytest.raises(ModelError, match="the engine is closed"):
        next(Generation(engine.session, None, request).pieces())
    engine.close()


def test_a_closed_engine_says_so_whatever_is_asked_of_it() -> None:
    """A template that was not read yet would be another one: its file has no metadata any more."""
    engine = Engine.open(demo_model(), device="emulator", context=CONTEXT, cache_folder=None)
    before = repr(engine)
    with pytest.raises(TypeError, match="an Engine has a device of its own"):
        pickle.dumps(engine)
    engine.close()
    assert engine.name in before
    assert repr(engine) == before.replace(f"context {CONTEXT}", "closed")
    for ask in (
        lambda: engine.chat([{"role": "user", "content": "Hi"}]),
        lambda: engine.generate([1, 2]),
        lambda: engine.logits([1, 2]),
        lambda: engine.tokenize("text"),
        lambda: engine.template,
    ):
        with pytest.raises(ModelError, match=r"the engine.* is closed"):
            ask()
