"""Answers of a recurrent model with drafts, where states are saved, lost and computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_speculation import FIXED, Given, few_letters, given
from tests.model.stepping import Eager
from urdir.driver.device import Device
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.budget import SessionBudget
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.task import Task
from urdir.model.engine.requests.tasks import Tasks
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

DRAFTS = replace(FIXED, shortest=1)
PAGED = SessionSettings(64, exact=True, sequences=3, page_len=16)
#: Tokens of answers that end in the second page.
LIMIT = 8


@pytest.fixture(scope="module")
def weights(device: Device, reference_file: Any) -> Iterator[Weights]:
    """Attention, the delta rule and convolutions."""
    with (
        Gguf(reference_file("qwen35-dense")) as gguf,
        Weights.load(gguf, Config.of(gguf), device) as loaded,
    ):
        yield loaded


@pytest.mark.slow
def test_answers_that_are_preempted_or_cancelled(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages run out beside drafts, and another request takes the slot of one that is cancelled."""
    requests = [
        replace(of, prompt=(of.prompt * 13)[:13], limit=LIMIT)
        for of in few_letters(np.random.default_rng(3), 4)
    ]
    left = (3,)
    found: list[list[Given]] = []
    preempted = []
    preempt = Tasks.preempt

    def watched(tasks: Tasks, task: Task) -> None:
        preempted.append(len(found))
        preempt(tasks, task)

    monkeypatch.setattr(Tasks, "preempt", watched)
    for drafts in (None, DRAFTS):
        with Session(device, weights, replace(PAGED, pages=4, drafts=drafts)) as session:
            limits = replace(Limits.for_throughput(session.shapes, len(requests)), ahead=4)
            found.append(given(session, requests, limits=limits, left=left))
    assert 1 in preempted
    for number, (theirs, mine) in enumerate(zip(*found, strict=True)):
        length = 5 if number in left else LIMIT
        assert mine.tokens[:length] == theirs.tokens[:length]
        assert len(mine.tokens) >= length
    assert sum(each.ending.accepted_tokens for each in found[1] if each.ending) > 5


@pytest.mark.slow
def test_prompts_go_on_from_states_that_were_saved(
    device: Device, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is the state after a prompt's pages, whatever came of the drafts after it."""
    monkeypatch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
    first = replace(few_letters(np.random.default_rng(4), 1)[0], limit=12)
    first = replace(first, prompt=(first.prompt * 21)[:21])
    found = []
    for drafts in (None, DRAFTS):
        with Session(device, weights, replace(PAGED, shared_states=3, drafts=drafts)) as session:
            before = given(session, [first])[0]
            again = replace(first, prompt=(*first.prompt, *before.tokens))
            found.append([before, *given(session, [again])])
    for theirs, mine in zip(*found, strict=True):
        mine.check_equal(theirs)
    ending = found[1][1].ending
    assert ending is not None
    assert ending.cached_tokens == 16
    assert ending.accepted_tokens > 0


@pytest.mark.full
def test_the_context_ends_within_drafts(device: Device, weights: Weights) -> None:
    request = few_letters(np.random.default_rng(5), 1)[0]
    prompt = (request.prompt * 64)[:60]
    request = replace(request, prompt=prompt, limit=None)
    found = []
    for drafts in (None, DRAFTS):
        with Session(device, weights, replace(PAGED, sequences=1, drafts=drafts)) as session:
            found += given(session, [request])
    found[1].check_equal(found[0])
    assert len(found[1].tokens) == 5


def test_replayed_steps_equal_launches_one_by_one(device: Device, weights: Weights) -> None:
    """In default arithmetic: graphs of several steps with drafts, and their launches."""

    requests = [replace(of, limit=28) for of in few_letters(np.random.default_rng(6), 1)]
    settings = SessionSettings(64, drafts=DRAFTS)
    with Session(device, weights, settings) as session:
        decode, launched = session.shapes.decode, []
        session.steps.record([decode(4, 1, Output.SAMPLE, count, drafted=True) for count in (1, 4)])
        launch = session.steps.launch

        def watched(shape: StepShape, stream: Any) -> None:
            launched.append(shape.steps)
            launch(shape, stream)

        session.steps.launch = watched  # type: ignore[method-assign]
        replayed = given(session, requests)[0]
    assert 4 in launched
    with Session(device, weights, settings, observer=Eager()) as session:
        eager = given(session, requests)[0]
    assert replayed.tokens == eager.tokens
    assert replayed.ending is not None
    assert replayed.ending.accepted_tokens > 2


def test_inputs_of_drafts_are_in_the_budget(weights: Weights) -> None:
    """They are no part of saved states; without drafts there are none."""
    plain, drafted = (
        SessionBudget.of(weights, replace(PAGED, shared_states=2, drafts=drafts)).recurrent
        for drafts in (None, DRAFTS)
    )
    names = {name for name in drafted.sizes() if "drafted_" in name}
    kinds = {name.split(".")[0] for name in names}
    assert kinds == {"drafted_mixed", "drafted_alpha", "drafted_beta"}
    assert {name for name in drafted.sizes() if name not in names} == plain.sizes().keys()
    for name, nbytes in plain.sizes().items():  # a ring has 8 slots in place of 3
        assert drafted.sizes()[name] == (nbytes // 3 * 8 if "tail" in name else nbytes)
