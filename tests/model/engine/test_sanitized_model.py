"""Whole models under the emulator's sanitizer: the graphs of prompts and tokens have no race."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from urdir.driver import bindings
from urdir.model.engine.engine import Engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("nano-llama-q8_0", "f16"), ("nano-qwen3-q4_k_m", "q8_0")]
)
def test_a_model_has_no_race(
    data: Path, name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens after a prompt, and logits, are those of the emulator without it, bit for bit."""

    def answer() -> tuple[list[int], np.ndarray]:
        path = str(data / "golden" / f"{name}.gguf")
        with Engine.open(path, device="emulator", context=32, kv_dtype=kv_dtype) as engine:
            engine.session.feed([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
            tokens = [engine.session.greedy_step() for _ in range(3)]
            engine.session.feed([7])
            return tokens, engine.session.logits_step()

    wanted, logits = answer()
    sanitized = functools.partial(bindings.emulated, sanitize=True)
    monkeypatch.setattr(bindings, "emulated", sanitized)
    found, sanitized_logits = answer()
    assert found == wanted
    assert np.array_equal(sanitized_logits, logits)
