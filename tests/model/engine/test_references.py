"""What of a folder of references runs, and why the rest does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def found_in() -> Any:
    path = Path(__file__).with_name("references.py")
    spec = importlib.util.spec_from_file_location("references", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.found_in


def names(params: list[Any]) -> dict[str, str]:
    """Names, with the reason where one is skipped."""
    return {p.id: p.marks[0].kwargs["reason"] if p.marks else "" for p in params}


def test_a_folder_of_all_kinds(tmp_path: Path, found_in: Any) -> None:
    tokens, logits = np.arange(3), np.zeros((3, 5), np.float32)
    for name, fields in {
        "family": {"logits": logits, "native": np.float32(0)},
        "plain": {"logits": logits},
        "with-draft": {"logits": logits, "draft_logits": logits},
        "encoder": {"embedding_last": logits, "native": np.float32(0)},
        "encoder-decoder": {"logits": logits, "encoder_tokens": tokens, "native": np.float32(0)},
        "texts": {"nll": logits},
    }.items():
        np.savez(tmp_path / f"{name}.npz", tokens=tokens, **fields)
        (tmp_path / f"{name}.gguf.xz").touch()
    (tmp_path / "plain.gguf.xz").rename(tmp_path / "plain.gguf")
    (tmp_path / "with-draft.gguf.xz").rename(tmp_path / "with-draft.target.gguf.xz")
    for name in ("with-draft.draft.gguf.xz", "plain.adapter.gguf.xz", "alone.gguf.xz"):
        (tmp_path / name).touch()
    for name, field in (("folder", "logits"), ("bert", "embedding")):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "golden.npz", tokens=tokens, **{field: logits})

    (tmp_path / "rounded").mkdir()
    np.savez(tmp_path / "rounded" / "golden.npz", tokens=tokens, logits=logits, logits_w8a8=logits)

    assert names(found_in(tmp_path, "folders of few bits")) == {"rounded": ""}
    assert names(found_in(tmp_path, "families")) == {
        "encoder": "encoder: there are no logits of every token",
        "family": "",
    }
    assert names(found_in(tmp_path, "golden")) == {
        "alone": "alone: there is no alone.npz",
        "plain": "",
        "plain.adapter": "plain.adapter: adapters have tests of their own",
        "texts": "texts: there are no logits of every token",
        "with-draft.draft": "with-draft.draft: drafts have tests of their own",
        "with-draft.target": "",
    }
    for name in ("mtp-a", "dspark-b", "dflash-b", "eagle3-b", "simple-c", "other-b"):
        np.savez(tmp_path / f"{name}.npz", tokens=tokens, draft_logits=logits)
        (tmp_path / f"{name}{'' if name == 'mtp-a' else '.draft'}.gguf.xz").touch()
    assert names(found_in(tmp_path, "drafts")) == {
        "eagle3-b": "",
        "mtp-a": "",
        "other-b": "other-b: drafts of this kind are not implemented",
        "with-draft": "with-draft: drafts of this kind are not implemented",
    }
    assert names(found_in(tmp_path, "plain drafts")) == {"simple-c": ""}
    assert names(found_in(tmp_path, "block drafts")) == {"dflash-b": "", "dspark-b": ""}
    assert names(found_in(tmp_path, "folders")) == {"folder": "", "rounded": ""}
    assert names(found_in(tmp_path, "encoder folders")) == {"bert": ""}
