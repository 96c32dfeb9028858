"""Consecutive products of 9 to 64 rows are one launch, if a device has all its CTAs at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.model.stepping import stepping
from urdir.driver import Device
from urdir.driver.emulator.api import Api
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.linear.products.gemm_chain import GemmChain

SMALL = Shape("llama", 2, 256, 2, 1, 128, 512, 90, False)


def chains(rows: int, sms: int, shape: Shape = SHAPES["llama-3.1-8b"]) -> Iterator[GemmChain]:
    """The chains of a step."""
    with SyntheticModel("model", "q4_k_m", shape) as model, paper_device("sm_90a", sms) as on:
        settings = SessionSettings(256, "f16", sequences=rows)
        with (
            Weights(model, Config.of(model), on) as weights,
            Session(on, weights, settings) as session,
        ):
            plan = build_plan(session.parts, StepShape(rows, 256, Output.GREEDY))
    for launch in plan:
        if isinstance(launch, Launch) and isinstance(launch.kernel, GemmChain):
            yield launch.kernel


@pytest.mark.parametrize(("rows", "sms", "count"), [(8, 132, 0), (16, 132, 32), (16, 96, 0)])
def test_a_layer_is_one_launch_beside_its_attention(rows: int, sms: int, count: int) -> None:
    found = list(chains(rows, sms))
    assert len(found) == count
    # the last layer has no queries, keys and values after it
    assert [len(chain.products) for chain in found] == [4] * (count - 1) + [3] * (count > 0)


def test_logits_are_those_of_a_launch_for_each_product() -> None:
    """Nine sequences, of different lengths; two SMs have no room for a chain."""
    logits = []
    for sms, count in ((2, 0), (8, 2)):
        assert len(list(chains(9, sms, SMALL))) == count
        api = Api(target="sm_90a", sm_count=sms)
        with (
            Device.open("emulator:sm_90a", api=api) as device,
            SyntheticModel("small", "q4_k_m", SMALL) as model,
            Weights.load(model, Config.of(model), device) as weights,
            stepping(device, weights, SessionSettings(16, "f16", sequences=9)) as eager,
        ):
            for sequence in range(9):
                eager.feed([7 + sequence] * (1 + sequence % 3), sequence)
            logits.append(np.stack(eager.logits(tuple(range(9)))))
    assert relative_rms(logits[1], logits[0]) < 1e-3
