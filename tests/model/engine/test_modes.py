"""Modes that the environment turns on: each shows what it promises, changes no token, and leaves
nothing behind.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from urdir.model.blocks.rows import Ending, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.generate import Generation
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.verify.observers import phase_of


def _story(device_name: str, settings: SamplingSettings) -> list[int]:
    with Engine.open(device=device_name, context=64) as engine:
        prompt = engine.tokenizer.encode("Once upon a time", parse_special=True)
        generation = Generation(
            engine.session,
            engine.tokenizer,
            prompt,
            settings,
            limit=5,
            host_sampling=engine.host_sampling,
        )
        assert "".join(generation.text())
        return generation.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_correctness_mode_chooses_the_same_tokens_on_the_host(
    device_name: str, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    settings = SamplingSettings(temperature=temperature, seed=3)
    on_device = _story(device_name, settings)
    monkeypatch.setenv("CORRECTNESS_MODE", "1")
    assert _story(device_name, settings) == on_device


def test_decode_timing_prints_the_phases_of_every_step(
    device_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _story(device_name, SamplingSettings(temperature=0.0))
    assert capsys.readouterr().err.count("total") == 0
    monkeypatch.setenv("DECODE_TIMING", "1")
    assert _story(device_name, SamplingSettings(temperature=0.0)) == plain
    lines = [line for line in capsys.readouterr().err.splitlines() if "total" in line]
    assert len(lines) >= 5
    phases = re.findall(r"([a-z-]+) \d+ us", lines[-1])
    assert phases == ["embedding", "attention", "feed-forward", "head", "choice", "total"]
    monkeypatch.delenv("DECODE_TIMING")
    assert _story(device_name, SamplingSettings(temperature=0.0)) == plain
    assert capsys.readouterr().err.count("total") == 0


def test_gpu_debug_summarises_every_layer(
    device_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _story(device_name, SamplingSettings(temperature=0.0))
    monkeypatch.setenv("GPU_DEBUG", "1")
    assert _story(device_name, SamplingSettings(temperature=0.0)) == plain
    err = capsys.readouterr().err
    for layer in range(6):
        assert re.search(rf"blk\.{layer}\.ffn_down y \(1, 256\): mean \S+, rms \S+", err)
    assert "not finite 0" in err


@pytest.mark.parametrize(
    ("label", "phase"),
    [
        ("token_embd", "embedding"),
        ("blk.17.attn_q", "attention"),
        ("blk.0.rope", "attention"),
        ("blk.0.attention.kv_append", "attention"),
        ("blk.3.ffn_down rows 8", "feed-forward"),
        ("blk.3.swiglu", "feed-forward"),
        ("output_norm", "head"),
        ("argmax", "choice"),
    ],
)
def test_every_launch_has_a_phase(label: str, phase: str) -> None:
    assert phase_of(label) == phase


def test_a_plan_and_its_graph_can_be_printed(device_name: str, data: Path) -> None:
    path = str(data / "golden" / "nano-llama-q8_0.gguf")
    with Engine.open(path, device=device_name, context=16) as engine:
        shape = StepShape(1, 256, Ending.GREEDY)
        text = str(engine.session.steps.bound(shape).plan)
        assert "blk.1.ffn_down" in text
        assert "argmax" in text
        dot = engine.session.steps.graph(shape).dot()
        assert dot.startswith("digraph")
        assert dot.count("->") >= len(engine.session.steps.bound(shape)) - 1
