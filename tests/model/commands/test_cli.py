"""What all commands share: help, flags that become settings; and `urdir logits`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from urdir.model.cli import COMMANDS
from urdir.model.commands import logits, options
from urdir.model.engine.options import EngineOptions
from urdir.model.engine.sampling_settings import DEFAULTS, OPENAI, SETTINGS, SamplingSettings
from urdir.model.errors import ModelError

Cli = Callable[..., tuple[int, str, str]]


def test_help_is_a_result_where_it_is_asked_for(cli: Cli) -> None:
    for argv in (("--help",), ("help",)):
        code, out, err = cli(*argv)
        assert (code, err) == (0, "")
        assert all(f"\n    {name}" in out for name in COMMANDS)
    assert cli("help", "run")[1] == cli("run", "--help")[1]


@pytest.mark.parametrize("words", [(), ("ptx",)])
def test_a_missing_command_is_bad_usage(cli: Cli, words: tuple[str, ...]) -> None:
    help_text = cli(*words, "--help")[1]
    assert cli(*words) == (2, "", help_text)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), replace(DEFAULTS, seed=1)),
        (
            ("--presence-penalty", "0.5", "--frequency-penalty", "-1.5", "--min-tokens", "3"),
            SamplingSettings(seed=1, presence_penalty=0.5, frequency_penalty=-1.5, min_tokens=3),
        ),
        (
            ("-l", "7+1.5", "--logit-bias", "30-100", "--repeat-last-n", "-1"),
            SamplingSettings(seed=1, logit_bias=((7, 1.5), (30, -100.0)), repeat_last_n=-1),
        ),
    ],
)
def test_flags_become_settings(flags: tuple[str, ...], expected: SamplingSettings) -> None:
    parser = argparse.ArgumentParser()
    options.add_sampling(parser)
    assert options.sampling_settings(parser.parse_args(["-s", "1", *flags])) == expected


def test_a_seed_that_is_not_given_is_drawn_by_each_answer() -> None:
    parser = argparse.ArgumentParser()
    options.add_sampling(parser)
    assert options.sampling_settings(parser.parse_args([])) == DEFAULTS
    assert options.sampling_settings(parser.parse_args(["-s", "-1"])).seed is None


def test_flags_that_are_not_given_leave_what_is_usual() -> None:
    parser = argparse.ArgumentParser()
    options.add_llama_flags(parser, "sampling", default=None)
    assert options.sampling_settings(parser.parse_args([]), OPENAI) == OPENAI
    args = parser.parse_args(["--temp", "0", "--top-k", "0"])
    assert options.sampling_settings(args, OPENAI) == replace(OPENAI, temperature=0)


FLAGGED = [name for name, of in SETTINGS.items() if of.bounds is not None and of.flags]


@pytest.mark.parametrize("name", [*FLAGGED, "min_tokens"])
def test_flags_have_the_bounds_of_their_settings(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    options.add_sampling(parser)
    flag, bounds = f"--{name.replace('_', '-')}", SETTINGS[name].bounds
    assert bounds is not None
    for value in (bounds.low, bounds.high):
        args = parser.parse_args([f"{flag}={value}"])
        assert getattr(options.sampling_settings(args), name) == value
    beyond = [bounds.high + 1] if name == "seed" else [bounds.low - 1, bounds.high + 1]
    for value in beyond:  # seed -1 is a new one
        with pytest.raises(SystemExit):
            parser.parse_args([f"{flag}={value}"])
        assert "must be between" in capsys.readouterr().err


def test_logits_of_a_file_without_a_vocabulary(cli: Cli, nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "logits.npy"
    code, out, _ = cli("logits", nano, "--tokens", "1,2,3", "--output", output, "--json")
    assert code == 0
    assert json.loads(out)["shape"] == [3, 320]
    rows = np.load(output)
    assert rows.shape == (3, 320)
    assert rows.dtype == np.float32
    (tmp_path / "tokens").write_text("1 2\n3\n", encoding="utf-8")
    cli("logits", nano, "--tokens", f"@{tmp_path / 'tokens'}", "--output", output)
    np.testing.assert_array_equal(np.load(output), rows)
    assert cli("logits", nano, "--tokens", "1,2,3", "-ctk", "q4_0", "-o", output)[0] == 0
    assert 0 < np.abs(np.load(output) - rows).max() < 0.5 * np.abs(rows).max()


def test_logits_of_a_text_that_fills_the_context(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 tokens of the demo model's."""
    opened: list[EngineOptions] = []

    def stop(wanted: EngineOptions) -> None:
        opened.append(wanted)
        raise ModelError("it would be opened")

    monkeypatch.setattr(logits, "open_engine", stop)
    given = ["--tokens", ",".join(["5"] * 512), "--output", tmp_path / "logits.npy"]
    assert cli("logits", "demo", *given)[0] == 1
    assert [of.context for of in opened] == [512]
