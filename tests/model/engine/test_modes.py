"""Modes that arguments turn on, and for commands the environment: each shows what it promises,
changes no token, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from tests.model.stepping import answer
from urdir.model.commands import opening
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.environment import read_environment
from urdir.model.verify.observers import PhaseTimer, TensorSummaries, phase_of

GREEDY = SamplingSettings(temperature=0.0)


def _story(device_name: str, settings: SamplingSettings = GREEDY, **modes: Any) -> list[int]:
    with Engine.open(device=device_name, context=64, **modes) as engine:
        prompt = engine.tokenizer.encode("Once upon a time", parse_special=True)
        generation = engine.generation(Request(prompt=tuple(prompt), settings=settings, limit=5))
        assert "".join(generation.text())
        return generation.tokens


@pytest.fixture(scope="module")
def plain(device_name: str) -> list[int]:
    """The tokens without any mode."""
    return _story(device_name)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.9])
def test_the_host_chooses_the_same_tokens(device_name: str, temperature: float) -> None:
    settings = SamplingSettings(temperature=temperature, seed=3)
    assert _story(device_name, settings, host_sampling=True) == _story(device_name, settings)


@pytest.mark.slow
def test_a_timer_prints_the_phases_of_every_step(
    device_name: str, plain: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _story(device_name, observer=PhaseTimer()) == plain
    lines = [line for line in capsys.readouterr().err.splitlines() if "total" in line]
    assert len(lines) >= 5
    phases = re.findall(r"([a-z-]+) \d+ us", lines[-1])
    assert phases == ["embedding", "attention", "feed-forward", "head", "choice", "total"]
    assert _story(device_name) == plain
    assert capsys.readouterr().err.count("total") == 0


@pytest.mark.slow
def test_summaries_show_every_layer(
    device_name: str, plain: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _story(device_name, observer=TensorSummaries()) == plain
    err = capsys.readouterr().err
    for layer in range(6):
        assert re.search(rf"blk\.{layer}\.ffn_down y \(1, 256\): mean \S+, rms \S+", err)
    assert "not finite 0" in err


@pytest.mark.slow
def test_an_engine_reads_no_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What commands are told by the environment, a library is told by arguments."""
    for name, value in {
        "URDIR_DEVICE": "cuda:99",
        "URDIR_CACHE_DIR": str(tmp_path / "cache"),
        "URDIR_PTX_OVERRIDE": str(tmp_path / "missing"),
        "URDIR_DUMP": str(tmp_path / "dump"),
        "CORRECTNESS_MODE": "1",
        "DECODE_TIMING": "1",
        "GPU_DEBUG": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with Engine.open(device="emulator", cache_folder=None, context=16) as engine:
        assert not engine.host_sampling
        assert answer(engine.session, [1], 1)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "is_on"), [("1", True), ("on", True), ("", False), ("0", False), ("False", False)]
)
def test_a_mode_may_be_switched_off_by_a_word(
    monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool
) -> None:
    for name in ("CORRECTNESS_MODE", "DECODE_TIMING", "GPU_DEBUG"):
        monkeypatch.setenv(name, value)
    found = read_environment()
    assert [found.correctness_mode, found.decode_timing, found.gpu_debug] == [is_on] * 3


@pytest.mark.slow
def test_commands_read_what_they_pass_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "URDIR_DEVICE": "emulator:sm_80",
        "URDIR_CACHE_DIR": str(tmp_path / "cache"),
        "URDIR_DUMP": str(tmp_path / "dump"),
        "CORRECTNESS_MODE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    args = argparse.Namespace(device=None)
    with opening.open_engine(opening.engine_options(args, None, 16)) as engine:
        assert engine.host_sampling
        assert engine.device.target == "sm_80"
        assert answer(engine.session, [1], 1)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "dump"}
    assert any(path.suffix == ".ptx" for path in (tmp_path / "dump").iterdir())


@pytest.mark.parametrize(
    ("variable", "kind"),
    [("DECODE_TIMING", PhaseTimer), ("GPU_DEBUG", TensorSummaries), ("NONE", NoneType)],
)
def test_a_variable_turns_on_an_observer(
    monkeypatch: pytest.MonkeyPatch, variable: str, kind: type
) -> None:
    monkeypatch.setenv(variable, "1")
    assert type(opening.observer(read_environment())) is kind


@pytest.mark.parametrize(
    ("label", "phase"),
    [
        ("token_embd", "embedding"),
        ("blk.17.attn_q", "attention"),
        ("blk.0.attention.tokens", "attention"),
        ("blk.3.ffn_down rows 8", "feed-forward"),
        ("blk.3.ffn_gate_up.activation", "feed-forward"),
        ("output_norm", "head"),
        ("argmax", "choice"),
    ],
)
def test_every_launch_has_a_phase(label: str, phase: str) -> None:
    assert phase_of(label) == phase


def test_a_plan_and_its_graph_can_be_printed(device_name: str, data: Path) -> None:
    path = str(data / "golden" / "nano-llama-q8_0.gguf")
    with Engine.open(path, device=device_name, context=16) as engine:
        shape = StepShape(1, 256, Output.GREEDY)
        text = str(engine.session.steps.bound(shape).plan)
        assert "blk.1.ffn_down" in text
        assert "argmax" in text
        dot = engine.session.steps.graph(shape).dot()
        assert dot.startswith("digraph")
        assert dot.count("->") >= len(engine.session.steps.bound(shape)) - 1
