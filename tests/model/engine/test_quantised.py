"""Quantised checkpoints, run: logits are those of the weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.quantised_folders import KINDS, ORDERED_EXPERTS, gptq, quantised, wide_floats
from urdir.driver import Device
from urdir.model.engine.engine import Engine
from urdir.model.engine.logits import logits_after
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.placement import Placement
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.linear.bytes_choice import multiplies_e4m3
from urdir.ptxgen.weights.formats import FORMATS

TOKENS = (5, 300, 17, 260, 77)


#: A prompt that tensor cores multiply, where they multiply packed vectors.
LONG = [*range(5, 205, 10)]


def _logits(path: Path, device: str, long: bool = False, **options: Any) -> Any:
    """Those after a prompt, after one more token and, if wanted, after `LONG`."""
    with (
        Engine.open(
            path, device=device, context=32, cache_folder=None, kv_dtype="f32", **options
        ) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed(TOKENS[:-1])
        prompt = eager.logits()[0]
        eager.feed(TOKENS[-1:])
        found = [prompt, eager.logits()[0]]
        if long:
            eager.truncate(0)
            eager.feed(LONG)
            found.append(eager.logits()[0])
        return np.array(found)


def _error(found: Any, wanted: Any) -> float:
    """That of the worst row."""
    return max(relative_rms(*rows) for rows in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("llama-bf16", "fp8-blocks"),
        pytest.param("llama-bf16", "gptq-order", marks=pytest.mark.full),  # of experts: below
        ("llama-bf16", "bitnet-auto"),
        ("qwen3moe-bf16", "nvfp4"),
        pytest.param("llama-bf16", "fp4", marks=pytest.mark.full),  # a codebook, as nf4
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


@pytest.mark.parametrize("name", ORDERED_EXPERTS)
@pytest.mark.turns(2)
def test_experts_with_orders_of_their_own(
    data: Path, tmp_path: Path, device_name: str, name: str
) -> None:
    """One token after another and a prompt, in both arithmetics. Of eight bits two sums of f32,
    with quants and with zero points, are larger than what is left of them."""
    most = 3e-5 if "8 bits" in name else 1e-5
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide")
    path, floats = quantised(source, ORDERED_EXPERTS[name], tmp_path)
    wanted = _logits(floats, device_name, long=True, exact=True)
    assert _error(_logits(path, device_name, long=True, exact=True), wanted) < most
    assert _error(_logits(path, device_name, long=True), wanted) < 2e-2


@pytest.mark.parametrize("name", ["gptq", "apart"])
def test_orders_of_experts_take_a_number_a_column(
    data: Path, tmp_path: Path, device_name: str, name: str
) -> None:
    """Beyond what weights without orders do."""
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide")
    nbytes = []
    for number, kind in enumerate((ORDERED_EXPERTS[name], gptq(4, 32))):
        (folder := tmp_path / str(number)).mkdir()
        path, _ = quantised(source, kind, folder)
        with Engine.open(path, device=device_name, context=32, cache_folder=None) as engine:
            nbytes.append(engine.weights.nbytes)
    shared = name == "gptq"
    vectors = (1 + 4) * 256 if shared else 3 * 256 + 2 * 4 * 256  # Q, K and V; gate and up
    assert nbytes[0] - nbytes[1] == 4 * (vectors + 2 * 64)  # and the output's 128


@pytest.mark.turns(4, which=(0, 1))
@pytest.mark.parametrize("slots", [0, 1, 2, 4])
def test_experts_with_orders_in_host_memory(
    data: Path, tmp_path: Path, device_name: str, slots: int
) -> None:
    """Streamed, or cached on the device: the same bits. With slots for less than a row's experts a
    launch norms x and brings it into orders, which rounds elsewhere."""
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide")
    path, _ = quantised(source, ORDERED_EXPERTS["gptq"], tmp_path)
    placement = Placement(host_experts=99, expert_slots=slots)
    for exact in (True, False):
        wanted = _logits(path, device_name, long=True, exact=exact)
        found = _logits(path, device_name, long=True, exact=exact, placement=placement)
        assert _error(found, wanted) <= (0.0 if slots != 1 else 2e-6 if exact else 1e-3)


@pytest.mark.parametrize("split", ["tensors", "layers"])
def test_experts_with_orders_on_two_devices(data: Path, tmp_path: Path, split: str) -> None:
    source = wide_floats(data / "safetensors" / "qwen3moe-bf16", tmp_path / "wide", layers=2)
    path, floats = quantised(source, ORDERED_EXPERTS["gptq"], tmp_path)
    wanted = _logits(floats, "emulator", long=True, exact=True)
    found = _logits(path, "emulator", long=True, exact=True, gpus=2, split=split)
    assert _error(found, wanted) < 1e-5


def test_prompts_of_fp8_matrices_are_multiplied_as_fp8(
    data: Path, tmp_path: Path, device: Device, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with a scale each: off by what rounding activations to eight bits makes, 4 %."""
    if not multiplies_e4m3(device.native_target, FORMATS["E4M3R256"]):
        pytest.skip(f"no products of floats of eight bits on {device.native_target}")
    source = wide_floats(data / "safetensors" / "llama-bf16", tmp_path / "wide")
    path, _ = quantised(source, KINDS["fp8-rows"], tmp_path)
    wanted = _last_logits(path, device_name, LONG, exact=True)
    assert relative_rms(_last_logits(path, device_name, LONG), wanted) < 2e-3
    monkeypatch.setattr("urdir.ptxgen.kernels.linear.bytes_choice.LEAST_FLOATS", len(LONG))
    assert 3e-3 < relative_rms(_last_logits(path, device_name, LONG), wanted) < 0.08


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
