"""What drafts cost and gain in time: a scheduler's steps on a device that is a table of times."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.model.engine.requests.paper_session import TOKEN, PaperStorage
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import Chosen, StepPlan
from urdir.model.engine.run_ahead import AHEAD, AT_ONCE
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.drafting import Drafting
from urdir.model.memory.buckets import row_bucket
from urdir.model.memory.draft_settings import DraftSettings

#: ms of a step by drafts, and of catching up: about as an H200 takes for 8B Q4_K_M with n-grams, a
#: 1B draft and an EAGLE-3 shape, MTP of 4B, and n-grams of Mamba (2026-11-28).
DEVICES = {
    "n-gram": ([1.28, 1.34, 1.36, 1.38, 1.42, 1.45, 1.47, 1.48], 0.0),
    "1B": ([1.28, 1.68, 2.05, 2.4], 1.2),
    "eagle3": ([1.28, 1.46, 1.6, 1.7], 0.2),
    "mtp": ([1.03, 1.45, 1.75], 0.2),
    "mamba": ([0.87, 1.2, 1.3, 1.4, 1.7, 1.7, 1.7, 1.7], 0.0),
}


def rate(name: str, accept: float, drafting: Drafting, tokens: int, seed: int) -> float:
    """Tokens a ms of an answer whose drafts are accepted with a probability."""
    times, catch_up = DEVICES[name]
    rng, end = random.Random(seed), 2 * tokens
    scheduler = Scheduler(PaperStorage(4096), slots=1, context=4096, drafting=drafting)
    scheduler.add(Request(prompt=(1, 2), settings=GREEDY, limit=end, ignore_end=True))
    queue: deque[tuple[list[StepPlan], float]] = deque()
    known, spent, steps = 0, 0.0, 0
    while known < tokens:
        while len(queue) < AHEAD and (plan := scheduler.plan()) is not None:
            plans = [plan, *scheduler.repeat(plan, AT_ONCE - 1)]
            each = 0.0 if plan.prompts else times[sum(plan.batch.drafts)]
            queue.append((plans, each * len(plans) + (catch_up if plan.missed else 0.0)))
        plans, ms = queue.popleft()
        drafts, count = sum(plans[0].batch.drafts), len(plans)
        rows, is_drafted = row_bucket(1 + drafts), drafts > 0
        if plans[0].missed:
            drafting.costs.learn_catch_up(rows, ms / 1e3)
        elif steps > 1:
            drafting.costs.learn(rows, ms / count / 1e3, drafted=is_drafted)
        spent, steps = spent + ms, steps + count
        for plan in plans:
            stood = next((i for i in range(drafts) if rng.random() >= accept), drafts)
            known += len([*scheduler.chosen(plan, [Chosen((TOKEN,) * (stood + 1), drafts)])])
    return known / spent


def mean_rate(name: str, accept: float, *, least: int = 0) -> float:
    """Of several answers, after one from which times and acceptance are known."""
    most = len(DEVICES[name][0]) - 1
    rest = DraftRest() if DEVICES[name][1] else None
    settings = DraftSettings(most=most, least=min(least, most))
    drafting = Drafting(settings, 8, rest=rest)
    rate(name, accept, drafting, 256, 100)
    return sum(rate(name, accept, drafting, 256, seed) for seed in range(9)) / 9


@pytest.mark.parametrize("name", DEVICES)
def test_drafts_that_fail_cost_under_2_percent(name: str) -> None:
    without = 1 / DEVICES[name][0][0]
    assert mean_rate(name, 0.0) > 0.98 * without
    assert mean_rate(name, 0.1) > 0.98 * without
    drafting = Drafting(DraftSettings(most=len(DEVICES[name][0]) - 1), 8, rest=DraftRest())
    assert rate(name, 0.0, drafting, 256, 0) > 0.97 * without  # nothing is known


@pytest.mark.parametrize("name", DEVICES)
def test_drafts_that_stand_are_as_fast_as_if_no_step_were_without_them(name: str) -> None:
    assert mean_rate(name, 0.8) > 0.97 * mean_rate(name, 0.8, least=9)
    assert mean_rate(name, 0.95) > 0.97 * mean_rate(name, 0.95, least=9)
