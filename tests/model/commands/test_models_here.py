"""`urdir list` and `urdir pull`: models that are here, and one that is brought."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.files import hub
from urdir.model.files.demo import demo_model
from urdir.model.files.hub import HubName

Cli = Callable[..., tuple[int, str, str]]


def test_list_has_the_demo_and_the_hubs_cache(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "absent"))
    assert [entry["name"] for entry in json.loads(cli("list", "--json")[1])] == ["demo"]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    for repo, files in {
        "models--a--b-GGUF": ["b-Q4_K_M.gguf", "b-Q8_0-00001-of-00002.gguf", "mmproj-b.gguf"],
        "models--c--whole": ["config.json", "model.safetensors"],
        "datasets--d--e": ["x.gguf"],
    }.items():
        snapshot = tmp_path / repo / "snapshots" / commit
        (tmp_path / repo / "blobs").mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (tmp_path / repo / "refs").mkdir()
        (tmp_path / repo / "refs" / "main").write_text(commit)
        for file in files:
            blob = tmp_path / repo / "blobs" / file
            blob.write_bytes(demo_model().read_bytes() if "Q4" in file else b"1234")
            (snapshot / file).symlink_to(blob)
    entries = json.loads(cli("list", "--json")[1])
    found = {entry["name"]: entry for entry in entries}
    # one part of two is no model
    assert list(found) == ["demo", "hf:a/b-GGUF:b-Q4_K_M.gguf", "hf:c/whole"]
    whole = found["hf:a/b-GGUF:b-Q4_K_M.gguf"]
    assert (whole["type"], whole["architecture"]) == ("Q4_K_M", "llama")
    assert whole["bytes"] == demo_model().stat().st_size
    assert found["hf:c/whole"]["bytes"] == 4
    head, *lines = cli("list")[1].splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert head.split() == ["name", "size", "type", "architecture", "changed"]


def test_pull_says_where_the_model_is(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20))
    asked: list[HubName] = []
    monkeypatch.setattr(hub, "download", lambda name: asked.append(name) or path)
    assert cli("pull", "a/b-GGUF") == (0, f"{path}  3.00 MiB\n", "")
    out = cli("pull", "hf:a/b-GGUF:Q8_0", "--json")[1]
    assert json.loads(out) == {"path": str(path), "bytes": 3 << 20}
    assert asked == [HubName("a/b-GGUF", None), HubName("a/b-GGUF", "Q8_0")]
    assert cli("pull", path)[0] == 2
