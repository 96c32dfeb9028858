"""Convolutions and scans of many sequences leave results packed, as launches after them would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan

SIZES: dict[str, Any] = {"layers": 2, "hidden": 256, "vocab": 96}
MODELS: dict[str, dict[str, Any]] = {
    "mamba-2.8b": {"ssm.inner_size": 512, "ssm.time_step_rank": 32},
    "lfm2-8b-a1b": {
        "attention.head_count_kv": np.array([0, 2], np.int32),
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 256,
        "leading_dense_block_count": 1,
    },
}
#: Launches that pack, which are spared: of each layer's convolution and scan.
SPARED = {"mamba-2.8b": 4, "lfm2-8b-a1b": 1}


def logits(device: Device, name: str, rows: int) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Kernels of the second of two steps of this many sequences, and its logits."""
    base = SHAPES[name]
    heads = {"heads": 4, "kv_heads": 2, "ffn": 512} if name.startswith("lfm2") else {}
    keys = {**base.keys, **MODELS[name]}
    model = SyntheticModel(name, "q4_k_m", replace(base, keys=keys, **SIZES, **heads))
    config = Config.of(model)
    with Weights(model, config, device) as weights:
        weights.upload(model)
        with Session(device, weights, SessionSettings(64, sequences=rows)) as session:
            parts = session.parts
            parts.state["sequence"].upload(np.arange(rows, dtype=np.uint32))
            tokens = np.random.default_rng(4).integers(0, 96, rows * 64, np.uint32)
            parts.state["tokens"].upload(tokens)
            for sequence in range(rows):
                parts.cache.reserve(sequence, 0, 2)
            plan = build_plan(parts, StepShape(rows, 64, Output.LOGITS))
            kernels = [op.kernel.name for op in plan if isinstance(op, Launch)]
            with device.create_stream() as stream:
                for position in range(2):
                    parts.state["position"].upload(np.full(rows, position, np.uint32))
                    execute.run(plan, device, stream)
                    stream.synchronize()
            found = parts.work.kept["logits"].download(np.float32)[: rows * 96]
    return kernels, found


@pytest.mark.parametrize("name", MODELS)
def test_results_are_packed_as_by_a_launch_after_them(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, found = logits(device, name, 16)
    for kernel in (CausalConv, SelectiveScan):
        monkeypatch.setattr(kernel, "can_pack", staticmethod(lambda *_: False))
    others, expected = logits(device, name, 16)
    assert others.count("pack") - kernels.count("pack") == SPARED[name]
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
