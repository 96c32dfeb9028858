"""Products of few rows that take packed activations, by type: heads, and norms that the launch
before begins."""

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
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput

#: What Q, K and V, gate and up, and the output, of another type in some models, take after a norm:
#: packed in an order, or None.
ORDERS = {
    "q4_k": ("units", "units", "units"),
    "w4g128": ("units", "units", None),
    "e4m3r256": ("units", "units", None),
    "e2m1g256": ("lanes", "lanes", None),
    "nvfp4": ("lanes", "lanes", "lanes"),
    "q6_k": ("lanes", "lanes", "lanes"),
    "q5_k": (None, None, None),
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
    heads = found["blk.5.attn_output"]
    assert heads.steps.has(PackedInput)
    output = heads.steps.find(PackedOutput)
    assert (output.order if output else None) == ORDERS[kind][0]
    orders = dict(zip(("blk.5.attn_qkv", "blk.5.ffn_gate_up", "output"), ORDERS[kind], strict=True))
    for name, order in orders.items():
        kernel = found[name]
        assert kernel.steps.has(BegunNorm)
        assert (kernel.order if kernel.steps.has(PackedInput) else None) == order


@pytest.mark.parametrize(("kind", "rows", "packed"), [("nvfp4", 2, True), ("q4_k", 4, False)])
def test_exact_factors_are_multiplied_with_packed_vectors_from_two_rows_on(
    kind: str, rows: int, packed: bool
) -> None:
    with SyntheticModel("llama-3.2-1b", kind) as model, paper_device("sm_90a", 132) as on:
        settings = SessionSettings(256, "f16", sequences=rows)
        with (
            Weights(model, Config.of(model), on) as weights,
            Session(on, weights, settings) as session,
        ):
            plan = build_plan(session.parts, StepShape(rows, 256, Output.GREEDY))
    found = {of.label: of.kernel for of in plan if isinstance(of, Launch)}
    for name in ("attn_qkv", "attn_output", "ffn_gate_up"):
        kernel = found[f"blk.5.{name}"]
        assert isinstance(kernel, GemmSmall)
        assert kernel.steps.has(PackedInput) == packed
