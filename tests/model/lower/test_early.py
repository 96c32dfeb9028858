"""Launches before a mixture that let the next one start before they wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.lower.experts import shared_read
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

QWEN3, QWEN35 = "qwen3-30b-a3b", "qwen3.5-35b-a3b"
KEYS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
#: Of layers with a recurrence, and with a shared expert.
STATE_KEYS = {
    "expert_shared_feed_forward_length": 256,
    "full_attention_interval": 2,
    "ssm.inner_size": 256,
    "ssm.state_size": 64,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
EARLY = {"attn_qkv", "attn_output", "ffn_gate_inp"}


@contextmanager
def opened(
    device: Device, name: str = QWEN3, loaded: bool = False, **settings: Any
) -> Iterator[Session]:
    """Two layers as of a published model."""
    base = SHAPES[name]
    keys = {**base.keys, **(KEYS if "expert_count" in base.keys else {})}
    keys |= STATE_KEYS if name == QWEN35 else {}
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 96}
    shape = replace(base, layers=2, keys=keys, **sizes)
    model = SyntheticModel(name, "q4_k_m", shape)
    config = Config.of(model)
    with Weights(model, config, device) as weights:
        if loaded:
            weights.upload(model)
        with Session(device, weights, SessionSettings(64, sequences=16, **settings)) as session:
            yield session


def early_ones(plan: Plan) -> set[str]:
    """Labels of the products and routers of layer 1 that start the next launch early."""
    kernels = {op.label: op.kernel for op in plan if isinstance(op, Launch)}
    starts = {label for label, kernel in kernels.items() if getattr(kernel, "starts_next", False)}
    return {label.removeprefix("blk.1.") for label in starts if label.startswith("blk.1.")}


@pytest.mark.parametrize(
    ("rows", "prompt", "together", "expected"),
    [
        (8, 0, True, EARLY),
        (2, 0, True, EARLY),
        (1, 0, True, {"attention"}),
        # products of a row each load x before they wait
        (8, 0, False, EARLY - {"ffn_gate_inp"}),
        (9, 0, True, set()),
        (8, 8, True, set()),
    ],
)
def test_which_launches_before_a_mixture_start_the_next_one(
    rows: int, prompt: int, together: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: together)
    with paper_device("sm_90a", 132) as device, opened(device) as session:
        plan = build_plan(session.parts, StepShape(rows, 64, Output.GREEDY, prompt=prompt))
    assert early_ones(plan) == expected


def test_no_launch_of_a_dense_model_or_in_exact_mode_does() -> None:
    with paper_device("sm_90a", 132) as device:
        for name, exact in (("qwen3-8b", False), (QWEN3, True)):
            with opened(device, name, exact=exact) as session:
                plan = build_plan(session.parts, StepShape(8, 64, Output.GREEDY))
            assert not early_ones(plan)


@pytest.mark.turns(8, which=(3, 4))  # each value
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("name", [QWEN3, QWEN35])
def test_nothing_reads_too_early(
    device: Device, name: str, rows: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays give the logits of launches one after the other, and the emulator finds no race of
    kernels that overlap."""
    monkeypatch.setattr(shared_read, "pays_together", lambda *_: together)
    found = [two_steps(device, name, rows, graph) for graph in (False, True)]
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(*found)


def two_steps(device: Device, name: str, rows: int, as_graph: bool) -> np.ndarray[Any, Any]:
    """The logits of the second of two steps, as launches or as a graph that is replayed."""
    with opened(device, name, loaded=True) as session:
        parts = session.parts
        for sequence in range(rows):
            parts.cache.reserve(sequence, 0, 2)
        parts.state["sequence"].upload(np.arange(rows, dtype=np.uint32))
        parts.state["position"].upload(np.zeros(rows, np.uint32))
        plan = build_plan(parts, StepShape(rows, 64, Output.LOGITS))
        assert "attn_output" in early_ones(plan)
        with device.create_stream() as stream:
            if as_graph:
                with execute.record(plan, device) as graph:
                    for _ in range(2):
                        graph.launch(stream)
                    stream.synchronize()
            else:
                for _ in range(2):
                    execute.run(plan, device, stream)
                stream.synchronize()
        return parts.work.kept["logits"].download(np.float32)[: rows * 96]
