"""Launches of steps with adapters: one more for each tensor that products of several rows read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.layers.adaptable import room_for
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

#: Of rows: what is launched beside the launches without adapters in a layer, and the steps of the
#: product of queries.
EXPECTED = {
    1: ([], ("norm", "self_adapted")),
    8: ([], ("packed_input", "begun_norm", "adapted")),
    32: ([], ("begun_norm", "adapted")),
}


@pytest.fixture(scope="module")
def plans() -> dict[tuple[int, bool], list[Launch]]:
    """The launches of two layers by rows, without and with adapters."""
    found = {}
    for adapts in (False, True):
        with SyntheticModel("llama-3.2-1b", "q4_k_m") as model, paper_device("sm_90a", 132) as on:
            config = Config.of(model)
            if adapts:
                config = replace(config, adapters=room_for(config, [], "f16", 8, 16))
            settings = SessionSettings(256, "f16", sequences=32)
            with Weights(model, config, on) as weights, Session(on, weights, settings) as session:
                for rows in EXPECTED:
                    shape = StepShape(rows, 256, Output.GREEDY)
                    launches = [
                        of for of in build_plan(session.parts, shape) if isinstance(of, Launch)
                    ]
                    found[rows, adapts] = [
                        of for of in launches if of.label.startswith(("blk.5.", "blk.6."))
                    ]
    return found


def labels(launches: list[Launch], layer: int) -> list[str]:
    return [of.label[6:] for of in launches if of.label.startswith(f"blk.{layer}.")]


@pytest.mark.parametrize("rows", EXPECTED)
def test_launches_of_a_layer(plans: dict[tuple[int, bool], list[Launch]], rows: int) -> None:
    before, after = (labels(plans[rows, adapts], 5) for adapts in (False, True))
    more, steps = EXPECTED[rows]
    shrinks = [f"{of}.lora" for of in ("attn_qkv", "attn_output", "ffn_gate_up", "ffn_down")]
    shrinks = shrinks if rows == 8 else []
    assert [label for label in after if label in shrinks] == shrinks
    assert sorted(after) == sorted([*before, *shrinks, *more])
    (queries,) = (of.kernel for of in plans[rows, True] if of.label == "blk.5.attn_qkv")
    assert tuple(step.stem for step in queries.steps) == steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", EXPECTED)
def test_layers_that_are_alike_have_adapters_of_their_own(
    plans: dict[tuple[int, bool], list[Launch]], rows: int
) -> None:
    launches = plans[rows, True]
    assert labels(launches, 5) == labels(launches, 6)
    half = len(launches) // 2
    assert [of.kernel for of in launches[:half]] == [of.kernel for of in launches[half:]]
    for name in ("lora_a", "lora_a1", "lora_b", "lora_b1"):
        places = [of.args[name] for of in launches if name in of.args]
        of_layers = [
            {place.offset for place in part}
            for part in (places[: len(places) // 2], places[len(places) // 2 :])
        ]
        assert of_layers[0].isdisjoint(of_layers[1])
