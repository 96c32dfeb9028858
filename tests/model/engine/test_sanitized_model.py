"""Whole models under the emulator's sanitizer: the graphs of prompts and tokens have no race."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from urdir.driver import bindings
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.memory import exchange
from urdir.ptxgen.kernels.attention.kv_types import KvDtype


def answer(path: Path, kv_dtype: KvDtype, gpus: int | None = None) -> tuple[list[int], np.ndarray]:
    """Tokens after a prompt, and logits."""
    with (
        Engine.open(path, device="emulator", gpus=gpus, context=32, kv_dtype=kv_dtype) as engine,
        EagerSteps(engine.session) as eager,
    ):
        eager.feed([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
        tokens = [eager.step()[0] for _ in range(3)]
        eager.feed([7])
        return tokens, eager.logits()[0]


@pytest.fixture(params=["nano-llama-q8_0", "nano-qwen2-q4_k_m", "gemma2-dense"])
def model(request: pytest.FixtureRequest, reference_file: Callable[[str], Path]) -> Path:
    """One of each kind of plan: the last has norms after its blocks."""
    return reference_file(request.param)


@pytest.mark.full
@pytest.mark.slow
def test_a_model_on_two_devices_has_no_race(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data / "golden" / "nano-llama-q8_0.gguf"
    monkeypatch.setattr(exchange, "TWO_SHOTS_FROM", {2: 1024})  # sums of the prompt
    wanted, logits = answer(path, "f16", gpus=2)
    sanitized = functools.partial(bindings.emulated, sanitize=True)
    monkeypatch.setattr(bindings, "emulated", sanitized)
    found, sanitized_logits = answer(path, "f16", gpus=2)
    assert found == wanted
    assert np.array_equal(sanitized_logits, logits)


@pytest.mark.turns(3, which=2)
@pytest.mark.slow
def test_a_model_has_no_race(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logits are those of the emulator without the sanitizer, bit for bit."""
    kv_dtype: KvDtype = "q8_0" if "qwen2" in model.name else "f16"
    wanted, logits = answer(model, kv_dtype)
    sanitized = functools.partial(bindings.emulated, sanitize=True)
    monkeypatch.setattr(bindings, "emulated", sanitized)
    found, sanitized_logits = answer(model, kv_dtype)
    assert found == wanted
    assert np.array_equal(sanitized_logits, logits)
