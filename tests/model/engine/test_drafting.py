"""How many drafts are chosen: the most tokens in a time, whatever was accepted before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from urdir.model.engine.speculation.drafting import Acceptance, Drafting
from urdir.model.engine.speculation.step_costs import StepCosts
from urdir.model.memory.buckets import ROWS, row_bucket
from urdir.model.memory.draft_settings import DraftSettings


def learned(likely: list[float], steps: int = 400) -> Acceptance:
    """An answer whose drafts are accepted with these probabilities by place."""
    rng, answer = np.random.default_rng(7), Acceptance()
    for _ in range(steps):
        accepted = next((i for i, p in enumerate(likely) if rng.random() >= p), len(likely))
        answer.learn(len(likely), accepted)
    return answer


def expected_tokens(answer: Acceptance, drafts: int) -> float:
    """Of a step with so many drafts: those of which all before stand."""
    return 1 + sum(np.prod([answer.at(i) for i in range(n + 1)]) for n in range(drafts))


def test_probabilities_are_learned_by_place() -> None:
    answer = learned([0.9, 0.5, 0.2])
    assert answer.at(0) == pytest.approx(0.9, abs=0.2)
    assert answer.at(1) == pytest.approx(0.5, abs=0.25)
    assert answer.at(2) == pytest.approx(0.2, abs=0.25)
    assert answer.at(9) == answer.at(2)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_drafts_give_more_tokens_in_a_time(seed: int) -> None:
    """Of up to three answers with up to four drafts, by trying all."""
    rng = np.random.default_rng([3, seed])
    costs = np.sort(rng.uniform(1, 3, len(ROWS)))
    answers = [learned(list(rng.uniform(0.5, 1, 4))) for _ in range(rng.integers(1, 4))]
    most_rows = int(rng.integers(len(answers), 14))
    drafting = Drafting(DraftSettings(most=4), most_rows, StepCosts(costs))

    def rate(counts: tuple[int, ...]) -> float:
        tokens = sum(expected_tokens(a, n) for a, n in zip(answers, counts, strict=True))
        return float(tokens / costs[ROWS.index(row_bucket(len(counts) + sum(counts)))])

    all_counts = itertools.product(range(5), repeat=len(answers))
    best = max(rate(c) for c in all_counts if len(c) + sum(c) <= most_rows)
    assert rate(tuple(drafting.choose([*answers]))) == pytest.approx(best)


def test_steps_that_are_not_ready_are_wished_for() -> None:
    drafting = Drafting(DraftSettings(most=7), 8)
    drafting.is_ready = lambda rows: rows <= 2
    assert drafting.choose([learned([0.95] * 7)]) == [1]
    assert drafting.wished == 8


def test_drafts_that_fail_are_tried_again_more_and_more_rarely() -> None:
    drafting, answer, tried = Drafting(DraftSettings(most=7), 8), Acceptance(), []
    for step in range(5000):
        (count,) = drafting.choose([answer])
        if count:
            tried.append(step)
            answer.asked()
            answer.learn(count, 0)
    assert tried[0] == 0
    assert len(tried) < 100
    pauses = [pause for pause in np.diff(tried) if pause > 1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1024 + 1


def test_several_drafts_fail_before_they_rest() -> None:
    """At first and after a rest, even where they do not pay; then results are waited for."""
    drafting = Drafting(DraftSettings(most=4), 8)
    for rows, drafted in ((1, False), (2, True), (4, True)):
        drafting.costs.learn(rows, 2.0 if drafted else 1.0, drafted=drafted)
    answer = Acceptance(0.2)
    for _ in range(3):
        assert drafting.choose([answer]) == [1]
        answer.asked()
    for result in range(3):
        assert drafting.choose([answer]) == [0]  # waits, and then rests
        answer.learn(1, 0)
        assert not answer.is_steady, result
    rest = 0
    while drafting.choose([answer]) == [0]:
        rest += 1
    assert rest >= 3 * 100  # three steps that take twice as long, in a hundredth of the time
    answer.asked()
    answer.learn(1, 1)
    assert answer.is_steady


def test_a_new_answer_begins_as_those_before_it_went() -> None:
    drafting = Drafting(DraftSettings(most=4), 8)
    assert drafting.choose([drafting.begin()])[0] > 1
    failing = drafting.begin()
    for _ in range(20):
        drafting.learn(failing, 4, [0])
    assert drafting.choose([drafting.begin()]) == [1]
    good = drafting.begin()
    for _ in range(20):
        drafting.learn(good, 4, [0] * 5)
    assert drafting.choose([drafting.begin()])[0] > 1


def test_an_answer_without_drafts_and_too_many_answers_have_none() -> None:
    drafting = Drafting(DraftSettings(most=7), 8)
    assert drafting.choose([None, learned([0.99] * 7)])[0] == 0
    assert drafting.choose([Acceptance() for _ in range(8)]) == [0] * 8
    assert sum(drafting.choose([Acceptance() for _ in range(6)])) <= 2


def test_at_least_so_many_are_chosen() -> None:
    drafting = Drafting(DraftSettings(most=5, least=2), 64)
    assert drafting.choose([learned([0.0] * 5), None]) == [2, 0]
    assert drafting.choose([Acceptance() for _ in range(64)]) == [0] * 64
    fixed = Drafting(DraftSettings(most=5, least=5), 64)
    assert fixed.choose([Acceptance() for _ in range(3)]) == [5, 5, 5]
    some = fixed.choose([Acceptance() for _ in range(30)])
    assert min(some) == 1
    assert sum(some) <= 34


def test_costs_are_what_was_measured_and_follow_it_elsewhere() -> None:
    costs = StepCosts([float(n + 1) for n in range(len(ROWS))])
    assert [costs.of(rows) for rows in (1, 2, 3, 5, ROWS[-1])] == [1, 2, 3, 5, len(ROWS)]
    costs.learn(4, 6.0)
    assert [costs.of(rows) for rows in (2, 4, 8)] == [3, 6, 7.5]
    for _ in range(200):
        costs.learn(4, 3.0)
    costs.learn(4, 1000.0)  # a step that waited for something else
    assert 3.0 < costs.of(4) < 3.2
    assert costs.of(4, drafted=True) == costs.of(4)
    costs.learn(4, 8.0, drafted=True)
    assert (costs.of(4, drafted=True), costs.of(8, drafted=True)) == (8, pytest.approx(8 * 5 / 4))
    assert costs.of(4) < 3.2
    costs.learn_catch_up(4, 9.5)
    assert costs.catch_up == 1.5
