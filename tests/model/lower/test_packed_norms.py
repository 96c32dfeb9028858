"""Products of few rows after a norm that the launch before begins and leaves packed, by type."""

from __future__ import annotations

import pytest

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall

#: What a type's weights take after a norm: packed in an order, or None.
ORDERS = {
    "q4_k": "units",
    "w4g128": "units",
    "e4m3r256": "units",
    "e2m1g256": "lanes",
    "nvfp4": "lanes",
    "q6_k": None,
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_is_that_of_the_type(kind: str) -> None:
    with SyntheticModel("llama-3.2-1b", kind) as model, paper_device("sm_90a", 132) as on:
        settings = SessionSettings(256, "f16", sequences=8)
        with (
            Weights(model, Config.of(model), on) as weights,
            Session(on, weights, settings) as session,
        ):
            plan = build_plan(session.parts, StepShape(8, 256, Output.GREEDY))
    found = {}
    for launch in plan:
        if isinstance(launch, Launch) and isinstance(launch.kernel, GemmSmall):
            found[launch.label] = launch.kernel
    assert found["blk.5.attn_output"].packs == ORDERS[kind]
    for name in ("attn_qkv", "ffn_gate_up"):
        kernel = found[f"blk.5.{name}"]
        assert kernel.summarised
        assert kernel.packed == (ORDERS[kind] is not None)
        assert not kernel.packed or kernel.order == ORDERS[kind]
