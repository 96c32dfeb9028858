"""Requests of models with windows begin with the pages that others have left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.requests.test_service import Collected
from tests.model.engine.test_recurrent_together import Letters, Opened, check_greedy, patient
from tests.model.engine.test_shared_states import CLOSE, logprobs_of
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.engine.session import Session
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.verify.conformance import relative_rms

SAMPLE = "gemma3-dense"
OTHERS = ("gpt-oss-moe", "gemma2-dense", "cohere2-dense", "llama4-moe", "gemma4-e", "lfm2-dense")
NAMES = [SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")
PAGE, WINDOW = 16, 20
LIKELY = SamplingSettings(temperature=0.0, logprobs=5)
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 128, 300)]


@pytest.fixture(scope="module", params=NAMES)
def engine(
    request: pytest.FixtureRequest, device_name: str, reference_file: Callable[[str], Path]
) -> Iterator[Engine]:
    file = reference_file(request.param)
    with Engine.open(file, device=device_name, context=128, kv_dtype="f32", exact=True) as engine:
        yield engine


class Answered(Collected):
    """An answer with the likeliest tokens at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.likely: list[dict[int, float]] = []

    def deliver(self, item: Any) -> None:
        if isinstance(item, Piece):
            self.likely += [dict(choice.top) for choice in item.choices]
        super().deliver(item)

    @property
    def cached(self) -> int:
        ending = self.ended()
        assert isinstance(ending, Ending), ending
        return ending.cached_tokens


def sharing(engine: Engine, **fields: Any) -> Session:
    """A session of three sequences, in pages."""
    wanted: dict[str, Any] = {"sequences": 3, "page_len": PAGE, "shared_states": 4, "chunk": 16}
    settings = SessionSettings(128, "f32", exact=True, **(wanted | fields))
    return Session(engine.device, engine.weights, settings)


def requested(prompt: Sequence[int], limit: int) -> Request:
    return Request(prompt=tuple(prompt), settings=LIKELY, limit=limit, ignore_end=True)


def ask(service: Service, prompt: Sequence[int], limit: int) -> Answered:
    answer = Answered()
    service.submit(requested(prompt, limit), answer.deliver)
    return answer


def check(engine: Engine, prompt: Sequence[int], answer: Answered) -> None:
    """The first token, and how likely it and others are, are those of the whole prompt."""
    whole = logprobs_of(engine, [*prompt])
    (top, *_) = answer.likely
    assert answer.tokens[0] == int(whole.argmax())
    assert relative_rms(np.array([*top.values()]), whole[list(top)]) < CLOSE


#: A first prompt, of several steps, and the tokens of its answer.
FIRST, LIMIT = TOKENS[:58], 6
OWN = TOKENS[200:207]
#: Where a prompt parts from the first one and its answer, and how many tokens it finds: less than a
#: quarter of a page is worth no copy.
PARTS = ((58, 58), (48, 48), (49, 48), (47, 47), (31, 31), (63, 63))


@pytest.mark.slow
def test_a_turn_begins_where_it_parts(engine: Engine) -> None:
    """In a page, at its end, one after, at the end of the prompt and of the answer, and in what the
    window has left behind, which nobody needed so far."""
    is_recurrent = bool(engine.weights.config.recurrents)
    with sharing(engine) as session, Service(Opened(session, Letters()), None) as service:
        first = ask(service, FIRST, LIMIT)
        assert first.cached == 0
        whole = [*FIRST, *first.tokens]
        for at, found in PARTS:
            prompt = [*whole[:at], *OWN]
            second = ask(service, prompt, 1)
            assert second.cached == found or is_recurrent, at
            check(engine, prompt, second)


@pytest.mark.slow
def test_pages_come_back_from_the_host(engine: Engine) -> None:
    """After another prompt took the pages on the device: the same bits as if they had stayed."""
    first, other = TOKENS[:50], TOKENS[60:150]
    with (
        sharing(engine, pages=7, prefix_host_memory=4 << 20) as session,
        Service(Opened(session, Letters()), None) as service,
    ):
        answers, found = [], []
        for prompt in (first, first, other, first):
            answers.append(ask(service, prompt, 1))
            found.append(answers[-1].cached)
    if not engine.weights.config.recurrents:
        assert found == [0, 48, 0, 48]
    assert answers[3].likely == answers[1].likely


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, DraftSettings(most=3)])
def test_any_requests_are_answered_as_alone(engine: Engine, drafts: DraftSettings | None) -> None:
    """With common beginnings, some cancelled, in few pages, so that some are preempted and prefixes
    move to host memory, and with drafts."""
    rng, asked = random.Random(7), []
    with sharing(engine, pages=11, drafts=drafts, prefix_host_memory=1 << 17) as session:
        opened = Opened(session, Letters())
        with Service(opened, None, patient(session)) as service:
            for number in range(8):
                start, length = rng.choice([0, 0, 40]), rng.randrange(10, 70)
                prompt = (*TOKENS[start : start + length], *TOKENS[number : number + 3])
                request = requested(prompt, rng.randrange(1, 24))
                asked.append((request, ask(service, prompt, request.limit or 0)))
                if rng.random() < 0.3:
                    service.cancel(service.submit(request, lambda _: None))
                if rng.random() < 0.5:
                    asked[-1][1].ended()
            for _, answer in asked:
                answer.ended()
        metrics = service.metrics()
    assert metrics.prefix_hits > 0
    for request, answer in asked:
        check_greedy(engine.session, request, answer, [])
