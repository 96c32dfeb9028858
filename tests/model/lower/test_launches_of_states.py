"""Launches of layers with states: of one token what stands around a product is in its launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

#: Launches of a step of two tokens that one of a single token does not have.
SPARED = {
    "mamba-dense": {"ssm_conv1d"},  # its states have 128 values
    "qwen35moe-moe": {
        *("ssm_conv1d", "ssm_norm", "attn_gate"),
        "ffn_gate_inp_shexp.activation",
    },
    "kimi-linear-moe": {"ssm_norm", "ssm_g_b"},
    "plamo2-dense": {"ssm_conv1d", "ssm_gate", "post_norm"},
    "lfm2-dense": set(),
}


def launches(session: Session, shape: int | StepShape) -> set[str]:
    """Labels of the layers' launches of a step, or one of so many rows."""
    if isinstance(shape, int):
        shape = StepShape(shape, 64, Output.GREEDY)
    plan = build_plan(session.parts, shape)
    labels = [op.label for op in plan if isinstance(op, Launch)]
    return {label.split(".", 2)[-1] for label in labels if label.startswith("blk.")}


@pytest.mark.parametrize("name", SPARED)
def test_one_token_has_fewer_launches(name: str, reference_file: Callable[[str], Path]) -> None:
    with Engine.open(reference_file(name), device="emulator", context=64, sequences=2) as engine:
        one, two = (launches(engine.session, rows) for rows in (1, 2))
    assert {label for label in two - one if not label.endswith(".norm")} == SPARED[name]
    assert one <= two


def test_launches_of_a_layer_of_mamba() -> None:
    """Its states of 16 values move on at the end of a product."""
    model = SyntheticModel("mamba-2.8b", "q4_k_m")
    config, settings = Config.of(model), SessionSettings(64, sequences=16)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, settings) as session,
    ):
        assert launches(session, 1) == {"ssm_in", "ssm_x", "ssm_dt", "ssm_out"}
        # of a prompt kernels leave packed what products take, but products themselves
        prompt = session.shapes.prompt(0, 64, Output.GREEDY)[0]
        own = {f"ssm_{name}" for name in ("in", "conv1d", "x", "dt", "scan", "out")}
        assert launches(session, prompt) == own | {"ssm_in.norm", "ssm_dt.pack", "output_rows"}
        # so do those of many sequences, eight by eight
        assert {label for label in launches(session, 16) if "pack" in label} == {"ssm_dt.pack"}
        several = {label for label in launches(session, 12) if "pack" in label}
        assert several == {"ssm_x.pack", "ssm_dt.pack", "ssm_out.pack"}


def test_launches_of_a_layer_of_kimi_linear() -> None:
    """One convolution of queries, keys and values; of one token one launch for two products of low
    rank."""
    model = SyntheticModel("kimi-linear-48b-a3b", "q4_k_m")
    config, settings = Config.of(model), SessionSettings(64, sequences=2)
    latent = {"attn_kv_a", "attn_k_b", "attention", "attn_v_b", "attn_output"}
    delta = {"ssm_in", "ssm_f_b", "ssm_conv1d_q", "ssm_scan", "ssm_out"}
    mixture = {"ffn_gate_inp", "ffn_experts_gate_up", "ffn_experts_down"}
    mixture |= {"ffn_gate_up_shexp", "ffn_down_shexp"}
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, settings) as session,
    ):
        one = latent | delta | mixture | {"ffn_gate_up", "ffn_down"}  # the first layer is dense
        assert launches(session, 1) == one
        combined = {"ffn_experts.combine"} & launches(session, 2)
        assert launches(session, 2) == one | combined | {"ssm_g_b", "ssm_norm"}
        prompt = session.shapes.prompt(0, 64, Output.GREEDY)[0]
        assert {f"ssm_conv1d_{name}" for name in "qkv"} <= launches(session, prompt)


def test_launches_of_a_layer_of_rwkv_7() -> None:
    """Nine: the three products of as many mixes are one, and so are those of low rank."""
    model = SyntheticModel("rwkv7-1.5b", "q4_k_m")
    config, settings = Config.of(model), SessionSettings(64)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, settings) as session,
    ):
        assert launches(session, 1) == {
            *("time_mix_shift", "time_mix_receptance", "time_mix_low_ranks.down"),
            *("time_mix_low_ranks", "time_mix", "time_mix_output"),
            *("channel_mix_shift", "channel_mix_key", "channel_mix_value"),
        }
