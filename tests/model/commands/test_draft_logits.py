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


@pytest.mark.usefixtures("no_device")
def test_a_draft_that_there_is_not_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    words = ("logits", "demo", "--draft", "mtp", "--tokens", "1", "-o", tmp_path / "x.npz")
    code, _, err = cli(*words)
    assert code == 1
    assert "llama.nextn_predict_layers" in err
    code, _, err = cli(*words, "--gpus", "2")
    assert code == 2
    assert "--draft runs on one GPU" in err
