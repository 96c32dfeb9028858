"""Quantised checkpoints, run: logits are those of the weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.quantised_folders import KINDS, OWN_ORDERS, quantised, wide_floats
from urdir.driver import Device
from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logits_after
from urdir.model.engine.realizar import EagerSteps
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.linear.bytes_choice import multiplies_e4m3
from urdir.ptxgen.weights.formats import FORMATS

TOKENS = (5, 300, 17, 260, 77)


def _logits(path: Path, device: str, **options: Any) -> Any:
    """Those after a prompt, and after one more token."""
    with (
        Engine.open(
            path, device=device, context=32, cache_folder=None, kv_dtype="f32", **options
        ) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed(TOKENS[:-1])
        prompt = eager.logits()[0]
        eager.feed(TOKENS[-1:])
        return np.array([prompt, eager.logits()[0]])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("llama-bf16", "fp8-blocks"),
        ("llama-bf16", "gptq-order"),
        ("llama-bf16", "bitnet-auto"),
        ("qwen3moe-bf16", "nvfp4"),
        ("llama-bf16", "fp4"),
        ("qwen3moe-bf16", "nf4"),
    ],
)
def test_logits_are_those_of_the_same_weights_as_floats(
    data: Path, tmp_path: Path, device_name: str, source: str, name: str
) -> None:
    """Exact arithmetic rounds sums alone, and NF4's values to 16 bits; else activations are
    rounded."""
    path, floats = quantised(data / "safetensors" / source, KINDS[name], tmp_path)
    wanted = _logits(floats, device_name, exact=True)
    most = 5e-5 if name == "nf4" else 1e-5
    assert relative_rms(_logits(path, device_name, exact=True), wanted) < most
    assert relative_rms(_logits(path, device_name), wanted) < 2e-2


def test_experts_with_orders_of_their_own(data: Path, tmp_path: Path, device_name: str) -> None:
    """Gate and up are rounded to F16."""
    path, floats = quantised(data / "safetensors" / "qwen3moe-bf16", OWN_ORDERS, tmp_path)
    wanted = _logits(floats, device_name, exact=True)
    with pytest.warns(UserWarning, match="desc_act"):
        found = _logits(path, device_name, exact=True)
    assert relative_rms(found, wanted) < 3e-4
    with pytest.warns(UserWarning, match="desc_act"):
        assert relative_rms(_logits(path, device_name), wanted) < 2e-2


def test_prompts_of_fp8_matrices_are_multiplied_as_fp8(
    data: Path, tmp_path: Path, device: Device, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with a scale each: off by what rounding activations to eight bits makes, 4 %."""
    if not multiplies_e4m3(device.native_target, FORMATS["E4M3R256"]):
        pytest.skip(f"no products of floats of eight bits on {device.native_target}")
    source = wide_floats(data / "safetensors" / "llama-bf16", tmp_path / "wide")
    path, _ = quantised(source, KINDS["fp8-rows"], tmp_path)
    tokens = [*range(5, 205, 10)]
    wanted = _last_logits(path, device_name, tokens, exact=True)
    assert relative_rms(_last_logits(path, device_name, tokens), wanted) < 2e-3
    monkeypatch.setattr("urdir.ptxgen.kernels.linear.bytes_choice.LEAST_FLOATS", len(tokens))
    assert 3e-3 < relative_rms(_last_logits(path, device_name, tokens), wanted) < 0.08


#: Tokens of prompts, the last of each is compared.
LENGTHS = (24, 32, 40, 48)


@pytest.mark.references("folders of few bits", [])
def test_rounded_activations_are_off_as_their_scheme_says(
    name: str, device: Device, device_name: str, pytestconfig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.3 times as far from the logits of the weights alone as activations that are rounded
    as the configuration says; ours are rounded where a weight scale is of a row or of 128
    columns, by token."""
    folder = pytestconfig.getoption("--references") / name
    with np.load(folder / "golden.npz") as file:
        tokens, rows = file["tokens"].tolist(), [length - 1 for length in LENGTHS]
        wanted, rounded = file["logits"][rows], file["logits_w8a8"][rows]
    for least in ("LEAST_FLOATS", "LEAST_BLOCKS"):
        monkeypatch.setattr(f"urdir.ptxgen.kernels.linear.bytes_choice.{least}", LENGTHS[0])
    devices = [device_name]
    for on in devices:
        with Engine.open(folder, device=on, context=64, cache_folder=None) as engine:
            found = np.array([next(logits_after(engine.session, tokens[:n])) for n in LENGTHS])
            types = {of.type_name for of in engine.file.tensors.values()} & {*FORMATS}
            target = engine.device.native_target
            rounds = any(multiplies_e4m3(target, FORMATS[name]) for name in types)
        error = relative_rms(found, wanted)
        assert error <= 1.3 * relative_rms(rounded, wanted)
        assert (error > 3e-3) == rounds
        if "E4M3R256" in types and on == "emulator":
            devices.append("emulator:sm_89")  # mma.sync in place of wgmma


def _last_logits(path: Path, device: str, tokens: list[int], **options: Any) -> Any:
    """Those after a prompt."""
    with Engine.open(path, device=device, context=32, cache_folder=None, **options) as engine:
        (logits, *_) = logits_after(engine.session, tokens)
        return logits[None]
