"""Choices of experts with the locality of published traces, by a plain cache of numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.model.stepping import answer
from urdir.driver.memory import Array
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.errors import UnsupportedError
from urdir.model.families.feed_forward import Router
from urdir.model.families.placement import Placement
from urdir.model.memory.local_choices import TOKENS, choice_sizes, local_choices, recency_shares
from urdir.ptxgen.kernels.experts.listed_logits import ListedLogits
from urdir.ptxgen.kernels.experts.place import PlaceExperts, parts_of

#: What caches of so many of 128 experts find in steady state, in %, as it was published: the first
#: trace's 8 (what the token before chose) and 51; and of answers that begin with empty caches, of
#: whose choices up to 5 or 7 % are first ones: the first trace's 24 and 81, the second's others.
STEADY, COLD = {8: 45.0, 51: 93.3}, {24: 74.1, 81: 96.2, 16: 57.0, 32: 76.0, 48: 87.0, 64: 91.0}


def found(choices: Array, slots: int) -> float:
    """What share of the choices a cache finds that replaces the least recently used experts."""
    used = choices.shape[1]
    last = np.arange(128, 0, -1) - 200 * np.ones(128)  # it has seen the lower ones last
    held, hits = {*range(slots)}, 0
    for token, chosen in enumerate(choices.tolist()):
        missing = [expert for expert in chosen if expert not in held]
        hits += used - len(missing)
        last[chosen] = token
        others = sorted(held - {*chosen}, key=lambda expert: float(last[expert]))
        held = held.difference(others[: len(missing)]).union(missing)
        assert len(held) == slots
    return hits / choices.size


@pytest.fixture(scope="module")
def choices() -> Array:
    return local_choices(128, 8)[:6000]


def test_tokens_choose_different_experts(choices: Array) -> None:
    assert all(len({*chosen}) == 8 for chosen in choices.tolist())
    assert choices.max() == 127


@pytest.mark.parametrize("slots", [*STEADY, *COLD])
def test_caches_find_what_they_find_in_published_traces(choices: Array, slots: int) -> None:
    share = 100 * found(choices, slots)
    if slots in STEADY:
        assert share == pytest.approx(STEADY[slots], abs=1)
    else:
        assert COLD[slots] - 2 < share < COLD[slots] + 7


def test_tokens_until_an_expert_is_chosen_again(choices: Array) -> None:
    """Published: 45 % by the next token, 80 % within eight, a median of 2."""
    last: dict[int, int] = {}
    apart = []
    for token, chosen in enumerate(choices.tolist()):
        apart += [token - last[expert] for expert in chosen if expert in last]
        last |= dict.fromkeys(chosen, token)
    tokens = np.array(apart)
    assert np.mean(tokens == 1) == pytest.approx(0.45, abs=0.01)
    assert np.mean(tokens <= 8) == pytest.approx(0.8, abs=0.03)
    assert np.median(tokens) == 2


@pytest.mark.parametrize(("experts", "used"), [(32, 4), (128, 4), (512, 10), (8, 2), (9, 8)])
def test_other_numbers_of_experts(experts: int, used: int) -> None:
    shares = recency_shares(experts, used)
    assert shares.sum() == pytest.approx(used)
    assert shares.max() <= 1
    assert shares[: experts // 2].sum() >= min(0.96 * used, experts // 2)
    chosen = local_choices(experts, used, 500)
    assert all(len({*each}) == used for each in chosen.tolist())


def test_rows_choose_independently(choices: Array) -> None:
    """Of two rows at the same position as many experts are the same as of any two choices."""
    kernel = ListedLogits(8, 128, 8, 4096)
    same = []
    for position in range(0, 4000, 7):
        at = np.full(8, position, np.uint32)
        logits = kernel.reference(position=at, choices=choices[:4096])["logits"]
        rows = [{*np.flatnonzero(row).tolist()} for row in logits]
        assert rows[0] == {*choices[position].tolist()}
        same += [len(rows[0] & row) for row in rows[1:]]
    assert np.mean(same) / 8 == pytest.approx(8 / 128, abs=0.01)


def test_a_model_chooses_what_was_drawn(
    reference_file: Callable[[str], Path], device_name: str
) -> None:
    wanted: dict[str, Any] = {"device": device_name, "context": 32, "cache_folder": None}
    wanted |= {
        "random_routing": "locality",
        "placement": Placement(host_experts=99, expert_slots=4),
    }
    with Engine.open(reference_file("qwen3moe-moe"), **wanted) as engine:
        answer(engine.session, [3], 6)
        ((kind, _),) = engine.weights.choices.items()
        caches = [*engine.weights.expert_caches.values()]
        counts = [cache.counts() for cache in caches]
        pairs = [cache.statistics()[0] for cache in caches]
    steps = pairs[0] // kind[1]
    assert steps >= 6
    expected = np.bincount(local_choices(*kind)[:steps].ravel(), minlength=kind[0])
    for each in counts:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("routing", [0.9, "locality"])
def test_experts_are_copied_as_late_as_those_that_a_router_chooses(
    routing: Any, reference_file: Callable[[str], Path]
) -> None:
    """After the launch that makes what the router reads: the choice does not depend on it."""
    wanted: dict[str, Any] = {"device": "emulator", "context": 32, "cache_folder": None}
    placement = Placement(host_experts=99, expert_slots=3)
    plans = []
    for chosen in (None, routing):
        wanted |= {"random_routing": chosen, "placement": placement}
        with Engine.open(reference_file("qwen3moe-moe"), **wanted) as engine:
            plans.append(engine.session.steps.bound(StepShape(1, 32, Output.GREEDY)).plan)
    edges = [{(of.before, of.after) for of in plan.edges()} for plan in plans]
    labels = [[of.label.removesuffix(".logits") for of in plan] for plan in plans]
    assert labels[0] == labels[1]
    made = [n for n, label in enumerate(labels[0]) if label.endswith("attn_output")]
    assert made
    for number in made:
        assert (number, number + 1) in edges[0] & edges[1]


def test_routers_of_groups_are_refused() -> None:
    linear = SimpleNamespace(rows=16)
    routers = [Router(cast(Any, linear), 2, groups=groups) for groups in (1, 4)]
    mixtures = [SimpleNamespace(router=router) for router in routers]
    layers = [SimpleNamespace(mixtures=mixtures)]
    config: Any = SimpleNamespace(random_routing="locality", layers=layers)
    with pytest.raises(UnsupportedError, match="groups of experts first"):
        choice_sizes(config)
    mixtures.pop()
    assert [*choice_sizes(config).values()] == [4 * 2 * TOKENS]
    config.random_routing = 0.9
    assert not choice_sizes(config)


@pytest.mark.parametrize(("slots", "most"), [(32, 1.1), (64, 1.1)])
def test_slots_are_given_away_nearly_as_to_the_least_recently_used(
    choices: Array, slots: int, most: float
) -> None:
    """`PlaceExperts` also counts how often experts were chosen: the drawn choices do not repay."""
    kernel, tokens = PlaceExperts(1, 8, 128, slots), choices[:1500]
    state, position = np.zeros(kernel.words, np.uint32), np.zeros(1, np.uint32)
    held, holder, *_ = parts_of(state, 128, slots)
    held[:slots] = holder[:] = np.arange(1, slots + 1)
    for chosen in tokens:
        state = kernel.reference(expert=chosen[None], position=position, state=state)["state"]
    copies = int(parts_of(state, 128, slots)[3][2])
    assert copies < most * (1 - found(tokens, slots)) * tokens.size
