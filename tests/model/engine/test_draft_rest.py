"""Rests of draft models: steps without drafts leave them out, and they catch up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_model_drafts import (
    DRAFTS,
    Round,
    Two,
    check_same,
    drafted_of,
    open_two,
    rounds_of,
)
from tests.model.engine.test_speculation import PLAIN, VOCABULARY, Given, given, prompts
from urdir.driver.device import Device
from urdir.driver.parallel import completed
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.requests.launcher import Launcher
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.run_ahead import RunAhead
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.speculation.drafting import Acceptance, Drafting
from urdir.model.engine.speculation.model_source import ModelSource
from urdir.model.engine.step import building
from urdir.model.families.shapes import Shape
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings


@pytest.fixture(scope="module")
def same(device: Device, random_model: Callable[..., Any]) -> Iterator[Two]:
    """A random model of two layers that is its own draft: a draft fails only where keys lack."""
    shape = Shape("llama", 2, 64, 2, 1, 32, 64, VOCABULARY, False)
    with open_two(device, *(random_model(shape, seed=1) for _ in range(2))) as two:
        yield two


@pytest.fixture(
    scope="module",
    params=["eagle3", *(pytest.param(of, marks=pytest.mark.full) for of in ("mtp", "dflash"))],
)
def heads(
    request: pytest.FixtureRequest, device: Device, reference_file: Callable[[str], Path]
) -> Iterator[Two]:
    """A draft of each kind that reads its model's streams."""
    names = {
        "mtp": ("mtp-deepseek2-bigram", None),
        "eagle3": ("target-any", "eagle3-d2t.draft"),
        "dflash": ("target-any", "dflash-d2t.draft"),
    }
    with ExitStack() as owners:
        model, draft = (
            None if name is None else owners.enter_context(Gguf(reference_file(name)))
            for name in names[request.param]
        )
        yield owners.enter_context(open_two(device, model, draft))


def phases(monkeypatch: pytest.MonkeyPatch, *lengths: int, shift: int = 0) -> None:
    """Steps have 3 drafts and none by turns, for so many steps; the last length goes on. Each
    further answer is ``shift`` steps later. Launches of several steps do not reach into the next
    turn, so that turns are as long where graphs of several steps are recorded early."""
    steps: dict[Acceptance, int] = {}
    ends = np.cumsum(lengths[:-1])
    repeat = Scheduler.repeat

    def turn(step: int) -> int:
        return int(np.searchsorted(ends, step, side="right"))

    def drafts(answer: Acceptance | None, number: int) -> int:
        if answer is None:
            return 0
        steps[answer] = steps.get(answer, -1 - shift * number) + 1
        return 0 if turn(steps[answer]) % 2 else 3

    def choose(self: Drafting, answers: Sequence[Acceptance | None]) -> list[int]:
        return [drafts(answer, number) for number, answer in enumerate(answers)]

    def repeated(self: Scheduler, plan: StepPlan, more: int) -> list[StepPlan]:
        known = [task.acceptance for task in self.tasks.running.values()]
        answers = [answer for answer in known if answer in steps]
        if any(turn(steps[answer]) != turn(steps[answer] + more) for answer in answers):
            return []
        plans = repeat(self, plan, more)
        for answer in answers:
            steps[answer] += len(plans)
        return plans

    monkeypatch.setattr(Drafting, "choose", choose)
    monkeypatch.setattr(Scheduler, "repeat", repeated)


def counted(monkeypatch: pytest.MonkeyPatch, acts: bool = True) -> list[tuple[int, int]]:
    """The tokens that the draft catches up with (not, unless it ``acts``)."""
    found: list[tuple[int, int]] = []
    catch_up = Launcher._catch_up

    def watched(self: Launcher, missed: Any) -> None:
        found.append((missed.start, missed.end))
        if acts:
            catch_up(self, missed)

    monkeypatch.setattr(Launcher, "_catch_up", watched)
    return found


def prepare_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of expected steps, also of several, are recorded before the next step is read."""
    wait = RunAhead.wait

    def patient(
        self: RunAhead[Any], use_wait: Callable[[], bool] = lambda: False, *more: object
    ) -> object:
        while use_wait():
            pass
        return wait(self)

    monkeypatch.setattr(RunAhead, "wait", patient)


def answers(
    device: Device, two: Two, settings: SessionSettings, requests: list[Request], drafts: bool
) -> list[Given]:
    """Answers of a session with drafts or without."""
    with two.session(device, replace(settings, drafts=DRAFTS if drafts else None)) as session:
        return given(session, requests)


ALONE = replace(PLAIN, sequences=1)
REQUESTS = [Request(prompt=(3, 1, 4, 1, 5, 9), settings=GREEDY, limit=52, ignore_end=True)]


@pytest.fixture(scope="module")
def expected(device: Device, same: Two) -> list[Given]:
    """The answer of `REQUESTS` without drafts."""
    return answers(device, same, ALONE, REQUESTS, drafts=False)


@pytest.mark.parametrize("prepared", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.full), None])
def test_drafts_after_a_rest_are_those_without_it(
    device: Device,
    same: Two,
    expected: list[Given],
    ahead: int | None,
    prepared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """k is 3, 0, 3, 0, 3: a model's own drafts are all accepted, once it has caught up."""
    if ahead is not None:
        monkeypatch.setattr("urdir.model.engine.run_ahead.AHEAD", ahead)
    if prepared:
        prepare_at_once(monkeypatch)
    phases(monkeypatch, 2, 9, 2, 14, 99)
    with monkeypatch.context() as patch:
        gaps = counted(patch)
        found = answers(device, same, ALONE, REQUESTS, drafts=True)
    check_same(found, expected)
    drafted, accepted = drafted_of(found)
    assert drafted == accepted > 2 * 2 * 3  # more than before the second rest
    assert len(gaps) == 2
    assert all(8 <= end - start <= 20 for start, end in gaps)
    with monkeypatch.context() as patch:
        counted(patch, acts=False)
        without = answers(device, same, ALONE, REQUESTS, drafts=True)
    check_same(without, expected)
    drafted, accepted = drafted_of(without)
    assert accepted < drafted


@pytest.mark.full
def test_one_sequence_rests_while_others_draft(
    device: Device, same: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages, with steps beside prompts; in some steps all of them rest."""
    phases(monkeypatch, 2, 6, 2, 6, 99, shift=2)
    settings = replace(PLAIN, sequences=2, page_len=16)
    requests = [
        Request(prompt=prompt, settings=GREEDY, limit=33 + at, ignore_end=True)
        for at, prompt in enumerate(prompts(np.random.default_rng(9), 3))
    ]
    expected = answers(device, same, settings, requests, drafts=False)
    gaps = counted(monkeypatch)
    found = answers(device, same, settings, requests, drafts=True)
    check_same(found, expected)
    assert len(gaps) >= 3
    drafted, accepted = drafted_of(found)
    assert accepted >= 0.9 * drafted > 20


def test_a_prefix_that_the_draft_missed_is_passed_before_drafts(
    device: Device, same: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer ends in a rest; the next request begins with its tokens."""
    phases(monkeypatch, 0, 5, 99)
    prompt = tuple(int(t) for t in np.random.default_rng(3).integers(3, VOCABULARY, 10))
    settings = replace(PLAIN, sequences=1, page_len=16, drafts=DRAFTS)
    first = Request(prompt=prompt, settings=GREEDY, limit=26, ignore_end=True)
    with same.session(device, settings) as session:
        with monkeypatch.context() as patch:
            phases(patch, 0, 99)
            (before,) = given(session, [first])
        after = (*prompt, *before.tokens, 7)
        gaps = counted(monkeypatch)
        second = Request(prompt=after, settings=GREEDY, limit=40, ignore_end=True)
        (found,) = given(session, [second])
    with same.session(device, replace(settings, drafts=None)) as session:
        (expected,) = given(session, [second])
    check_same([found], [expected])
    assert found.ending is not None
    assert found.ending.cached_tokens >= 32
    assert [start for start, _ in gaps] == [0]
    assert gaps[0][1] >= len(after)
    assert found.ending.accepted_tokens == found.ending.drafted_tokens > 10


@pytest.mark.slow
def test_heads_keep_what_they_would_have_kept_without_a_rest(
    device: Device, heads: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They draft the same as if every step had kept keys and values, and (on a GPU) do not if they
    do not catch up."""
    phases(monkeypatch, 1, 7, 99)
    request = Request(prompt=(3, 1, 4, 1, 5, 9), settings=GREEDY, limit=18, ignore_end=True)
    settings = replace(PLAIN, sequences=1, drafts=DRAFTS)

    def rounds(*, acts: bool) -> list[Round]:
        with monkeypatch.context() as patch, heads.session(device, settings) as session:
            gaps = counted(patch, acts)
            found = rounds_of(session, request, monkeypatch)
        assert [end - start for start, end in gaps] == [7]
        return found

    rested = rounds(acts=True)
    left_out = None
    if heads.pair.file is not None and not device.is_emulated:  # that of MTP hardly looks at keys
        left_out = rounds(acts=False)
    monkeypatch.setattr(ModelSource, "_append_rested", lambda self, plan, parts, shape, rows: rows)
    expected = rounds(acts=False)
    assert len(expected) > 3
    assert rested == expected
    assert left_out != expected


@pytest.mark.full
def test_heads_draft_after_a_rest_longer_than_their_ring(
    device: Device, heads: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("memory.draft_model", "engine.speculation.model_source"):
        monkeypatch.setattr(f"urdir.model.{module}.RING_SLOTS", 4)
    phases(monkeypatch, 1, 9, 99)
    request = Request(prompt=(3, 1, 4, 1, 5, 9), settings=GREEDY, limit=20, ignore_end=True)
    gaps = counted(monkeypatch)
    settings = replace(PLAIN, sequences=1, page_len=16)
    found = answers(device, heads, settings, [request], drafts=True)
    check_same(found, answers(device, heads, settings, [request], drafts=False))
    assert max(end - start for start, end in gaps) >= 9
    assert drafted_of(found)[0] > 3


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_without_drafts_leave_the_draft_out(device: Device, same: Two, steps: int) -> None:
    """Their launches are those without a draft model; a step that catches up has the others."""
    with same.session(device, replace(PLAIN, drafts=DRAFTS)) as session:

        def launches(shape: StepShape, source: Any = session.source) -> int:
            return len(completed(building(session.parts, shape, source)))

        for rows in (1, 2, 4):
            shape = session.shapes.decode(rows, 9, Output.GREEDY, steps)
            assert launches(shape) == launches(shape, None)
            drafted = session.shapes.decode(rows + 3, 9, Output.GREEDY, steps, drafted=True)
            assert launches(drafted) > launches(drafted, None)
        catch_up, end = session.shapes.catch_up(2, 9)
        assert end == 9
        prompt = replace(catch_up, draft_only=False)
        own = launches(prompt) - launches(prompt, None)
        assert launches(catch_up) == own > 0
