"""`urdir env`: the caches, and what is deleted of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.driver.cache import CubinCache

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("clear", [(), ("--clear-cache",)])
def test_env_of_a_cache_that_is_a_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clear: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("URDIR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, _ = cli("env", "--json", *clear)
    assert (code, json.loads(out)["cache"]["bytes"]) == (0, 0)


def test_env_clears_its_own_files_alone(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "mine" / "emulator")
    cache.put("key", b"1234")
    cache.remember("spec", "0" * 64)
    others = [tmp_path / "mine" / name for name in ("thesis.txt", "emulator/notes.txt")]
    for other in others:
        other.write_text("not a kernel")
    monkeypatch.setenv("URDIR_CACHE_DIR", str(tmp_path / "mine"))
    kept = [path for path in (tmp_path / "mine" / "emulator").rglob("*") if path.is_file()]
    assert len(kept) == 3
    found = json.loads(cli("env", "--json")[1])["cache"]["bytes"]
    assert found == sum(path.stat().st_size for path in kept)
    assert cli("env", "--json", "--clear-cache")[0] == 0
    assert sorted(path for path in (tmp_path / "mine").rglob("*") if path.is_file()) == sorted(
        others
    )
    others[1].unlink()
    assert CubinCache(tmp_path / "mine" / "emulator").get("key") is None
    assert cli("env", "--json", "--clear-cache")[0] == 0
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
