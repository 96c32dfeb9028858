"""`urdir logits --draft`: what it writes, and what is refused before a device is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.verify.conformance import relative_rms

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a device was opened")

    monkeypatch.setattr(Device, "open", refuse)


def test_logits_of_a_model_and_its_heads(
    cli: Cli, tmp_path: Path, data: Path, reference_file: Callable[[str], Path]
) -> None:
    name, output = "mtp-qwen35-own", tmp_path / "out.npz"
    with np.load(data / "drafts" / f"{name}.npz") as golden:
        tokens, logits, drafted = (golden[f] for f in ("tokens", "logits", "draft_logits"))
    given = ",".join(map(str, tokens[:3].tolist()))
    code, out, _ = cli(
        *("logits", reference_file(name), "--draft", "mtp", "--tokens", given),
        *("-o", output, "--exact", "--json"),
    )
    assert code == 0
    shapes = {"logits": [3, 128], "draft_logits": [1, 3, 128]}
    assert json.loads(out) == {"output": str(output), "shapes": shapes}
    with np.load(output) as found:
        assert relative_rms(found["logits"], logits[:3]) <= 1e-4
        assert relative_rms(found["draft_logits"], drafted[:, :3]) <= 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "eagle3-d2t",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("dflash-d2t", "simple-small")),
    ],
)
def test_logits_of_a_model_and_the_draft_in_a_file(
    name: str, cli: Cli, tmp_path: Path, data: Path, reference_file: Callable[[str], Path]
) -> None:
    output = tmp_path / "out.npz"
    with np.load(data / "drafts" / f"{name}.npz") as golden:
        tokens, logits, drafted = (golden[f] for f in ("tokens", "logits", "draft_logits"))
    given = ",".join(map(str, tokens[:3].tolist()))
    model, draft = reference_file("target-any"), reference_file(f"{name}.draft")
    words = ("logits", model, "--draft", draft, "--tokens", given, "-o", output, "--exact")
    assert cli(*words)[0] == 0
    with np.load(output) as found:
        assert found["logits"].shape == (3, 128)
        assert relative_rms(found["logits"], logits[:3]) <= 1e-4
        assert found["draft_logits"].shape == ((5 if name == "dflash-d2t" else 3), 128)
        if name == "dflash-d2t":  # a block after three tokens, the goldens' is after all
            assert np.isfinite(found["draft_logits"]).sum() == 5 * 72
            return
        # the last row of EAGLE-3 has the token that the model chooses there
        known = np.isfinite(drafted[:2])
        np.testing.assert_array_equal(np.isfinite(found["draft_logits"][:2]), known)
        assert relative_rms(found["draft_logits"][:2][known], drafted[:2][known]) <= 1e-4


@pytest.mark.usefixtures("no_device")
def test_a_draft_that_does_not_fit_is_refused_by_name(
    cli: Cli, tmp_path: Path, reference_file: Callable[[str], Path], make_gguf: Callable[..., Path]
) -> None:
    output, kind = tmp_path / "x.npz", "gemma4-assistant"
    draft, small = reference_file("eagle3-shared.draft"), reference_file("simple-small.draft")
    for model, file, what in [
        (small, draft, "hidden states of 128 values (eagle3.target_hidden_size)"),
        ("demo", small, "another vocabulary: a tokeniser 'test', the model has"),
        ("demo", make_gguf({"general.architecture": kind}), f"{kind}.attention.layer_norm_rms"),
    ]:
        code, _, err = cli("logits", model, "--draft", file, "--tokens", "1", "-o", output)
        assert code == 1
        assert str(file) in err
        assert what in err


@pytest.mark.usefixtures("no_device")
def test_a_draft_that_there_is_not_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    words = ("logits", "demo", "--draft", "mtp", "--tokens", "1", "-o", tmp_path / "x.npz")
    code, _, err = cli(*words)
    assert code == 1
    assert "llama.nextn_predict_layers" in err
    code, _, err = cli(*words, "--gpus", "2")
    assert code == 2
    assert "--draft runs on one GPU" in err
