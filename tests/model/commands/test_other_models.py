"""Commands with models that are no decoders: encoder-decoders, and those that fill masks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.model.engine.test_diffusion import write_as
from urdir.model.cli import main
from urdir.model.commands.diffused import diffusion_settings
from urdir.model.engine.diffusion import DiffusionSettings
from urdir.model.files.demo import demo_model
from urdir.model.verify.conformance import relative_rms

ON = ("--device", "emulator")


@pytest.fixture
def filler(tmp_path: Path) -> str:
    """The demo model as a LLaDA."""
    return str(write_as("llada", demo_model(), tmp_path / "llada.gguf"))


@pytest.mark.slow
def test_logits_of_a_decoder_s_tokens(
    reference_file: Callable[[str], Path], tmp_path: Path, data: Path
) -> None:
    golden, output = np.load(data / "encoder_decoders" / "t5.npz"), tmp_path / "logits.npy"
    source, tokens = (",".join(map(str, golden[of])) for of in ("encoder_tokens", "tokens"))
    path = str(reference_file("t5"))
    wanted = ["logits", path, "--tokens", source, "--exact", "-o", str(output), *ON]
    assert main([*wanted, "--decoder-tokens", tokens[: tokens.index(",")]]) == 0
    assert relative_rms(np.load(output), golden["logits"][:1]) < 1e-4


def test_a_decoder_has_no_tokens_of_a_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ("-o", str(tmp_path / "logits.npy"))
    assert main(["logits", "--tokens", "1", "--decoder-tokens", "1", *output, *ON]) == 2
    assert "--decoder-tokens: the model has no encoder" in capsys.readouterr().err


def test_logits_of_drafts_are_those_of_decoders(
    filler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ("logits", filler, "--tokens", "1", "-o", str(tmp_path / "logits.npz"), *ON)
    assert main([*wanted, "--draft", str(demo_model())]) == 1
    assert "drafts are those of decoders, 'llada' models are none" in capsys.readouterr().err
    assert main([*wanted, "--draft", str(demo_model()), "--decoder-tokens", "1"]) == 2
    assert "a model with a draft has no encoder" in capsys.readouterr().err


@pytest.mark.slow
def test_run_fills_masks(filler: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [
        "run",
        filler,
        "--raw",
        "-p",
        "What is",
        "-n",
        "4",
        "--temp",
        "0",
        "-c",
        "32",
        "--json",
    ]
    steps = ["--diffusion-steps", "2", "--diffusion-visual", *ON]
    assert main([*wanted, *steps]) == 0
    found = capsys.readouterr()
    text = json.loads(found.out)["text"]
    assert found.err.splitlines()[-1].strip() == text.strip()
    assert len(found.err.splitlines()) >= 2
    assert main([*wanted, *steps, "--stop", text[1]]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text[: text.index(text[1])]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--diffusion-eps", "0.1", "--diffusion-block-length", "4"), "give one of them"),
        (("-j", "{}"), "not filled by a grammar or a schema"),
        (("--diffusion-algorithm", "5"), "--diffusion-algorithm"),
    ],
)
def test_flags_that_run_refuses(
    filler: str, flags: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["run", filler, "--raw", "-p", "What", "-c", "32", *flags, *ON])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert error in capsys.readouterr().err


def test_flags_are_settings() -> None:
    """Of no numbers but of one algorithm 0 means that nothing is given."""
    flags = {"algorithm": 0, "block_length": 0, "add_gumbel_noise": 1.0, "steps": None}
    given = argparse.Namespace(
        **{f"diffusion_{name}": of for name, of in flags.items()}, diffusion_visual=False
    )
    assert diffusion_settings(given) == DiffusionSettings(algorithm="origin", gumbel_noise=True)


def test_flags_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "demo", "-p", "What is", "--diffusion-steps", "4", *ON]) == 2
    assert "--diffusion-steps: 'llama' models do not" in capsys.readouterr().err


def test_a_chat_ends_at_once(filler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", filler, "Hello there", *ON]) == 1
    assert "models fill masked tokens (diffuse), and give no answers" in capsys.readouterr().err


def test_serve_refuses_what_fills_masks(filler: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", filler, "--port", "0", *ON]) == 1
    assert "which is not served" in capsys.readouterr().err
