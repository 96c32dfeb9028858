"""The cubin cache on disk: private, whole entries only, bounded, shared by processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from urdir.driver.cache import FORMAT, CacheWarning, CubinCache
from urdir.driver.private_folder import PrivateFolder

Start = Callable[..., Any]


def test_returns_what_was_put(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "kernels")
    assert cache.get("k") is None
    assert cache.ptx_hash("spec") is None
    digest = hashlib.sha256(b"ptx").hexdigest()
    cache.put("k", b"\x7fELF cubin")
    cache.remember("spec", digest)
    other = CubinCache(tmp_path / "kernels")
    assert other.get("k") == b"\x7fELF cubin"
    assert other.ptx_hash("spec") == digest


def test_entry_starts_with_the_raw_cubin(tmp_path: Path) -> None:
    CubinCache(tmp_path).put("k", b"\x7fELF cubin")
    assert (tmp_path / f"cubins/k.{FORMAT}.cubin").read_bytes().startswith(b"\x7fELF cubin")


@pytest.mark.parametrize("damage", [b"", b"short", b"\x7fELF cubiN" + b"0" * 32])
def test_damaged_entry_is_deleted(tmp_path: Path, damage: bytes) -> None:
    cache = CubinCache(tmp_path)
    cache.put("k", b"\x7fELF cubin")
    path = tmp_path / f"cubins/k.{FORMAT}.cubin"
    path.write_bytes(damage)
    with pytest.warns(CacheWarning, match=r"k\.\d+\.cubin is rebuilt: it is damaged"):
        assert cache.get("k") is None
    assert not path.exists()


def test_entries_of_another_version_are_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path, limit=40)
    with monkeypatch.context() as earlier:
        earlier.setattr("urdir.driver.cache.FORMAT", 0)
        cache.put("k", b"of another form")
        cache.remember("spec", "0" * 64)
    assert cache.get("k") is None  # and no warning: the package was upgraded, nothing is wrong
    assert cache.ptx_hash("spec") is None
    cache.put("k", b"\x7fELF cubin")
    assert [path.name for path in (tmp_path / "cubins").iterdir()] == [f"k.{FORMAT}.cubin"]


def test_damaged_spec_entry_counts_as_absent(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    cache.remember("spec", "../../etc/passwd")
    assert cache.ptx_hash("spec") is None


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, limit=3 * (100 + 32))
    for i, key in enumerate("abc"):
        cache.put(key, b"x" * 100)
        os.utime(tmp_path / f"cubins/{key}.{FORMAT}.cubin", (i, i))
    assert cache.get("a") is not None  # used now: b is the oldest
    cache.put("d", b"x" * 100)
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]


def test_the_folder_is_listed_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred entries, of which half fit: it is listed as it fills, then for each."""
    cache = CubinCache(tmp_path, limit=50 * 132)
    listed = []
    entries = PrivateFolder.entries
    monkeypatch.setattr(PrivateFolder, "entries", lambda self: listed.append(1) or entries(self))
    for i in range(100):
        cache.put(f"k{i}", b"x" * 100)
        os.utime(tmp_path / f"cubins/k{i}.{FORMAT}.cubin", (i, i))
        kept = [int(path.name[1:].partition(".")[0]) for path in (tmp_path / "cubins").iterdir()]
        assert sorted(kept) == list(range(max(0, i - 49), i + 1))
        if i == 40:
            assert len(listed) < 5
    assert len(listed) < 65


def test_entry_above_the_bound_still_serves_this_run(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, limit=10)
    cache.put("a", b"x" * 100)
    assert cache.get("a") == b"x" * 100


def test_abandoned_temporary_files_go_too(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path, limit=200)
    old, young = tmp_path / "cubins/.new-old", tmp_path / "cubins/.new-young"
    for path in (old, young):
        path.write_bytes(b"x" * 500)
    os.utime(old, (1, 1))
    cache.put("k", b"x" * 100)
    assert (old.exists(), young.exists()) == (False, True)


def test_clear_removes_everything(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    cache.put("k", b"cubin")
    cache.remember("s", "0" * 64)
    cache.clear()
    assert cache.get("k") is None
    assert cache.ptx_hash("s") is None


def test_strange_keys_become_file_names_inside_the_folder(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "kernels")
    for key in ("../escape", "a/b", "x" * 500, "", ".."):
        cache.remember(key, hashlib.sha256(key.encode()).hexdigest())
    for key in ("../escape", "a/b", "x" * 500, "", ".."):
        assert cache.ptx_hash(key) == hashlib.sha256(key.encode()).hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]


def test_vanished_folder_costs_a_warning(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "kernels")
    (tmp_path / "kernels/cubins").rmdir()
    with pytest.warns(CacheWarning, match="cannot write"):
        cache.put("k", b"cubin")
    assert cache.get("k") is None


_HAMMER = """
import sys, warnings
from pathlib import Path
from urdir.driver.cache import CubinCache

warnings.simplefilter("error")
cache = CubinCache(Path(sys.argv[1]), limit=40_000)
for i in range(60):
    key = f"k{(i * 7 + int(sys.argv[2])) % 10}"
    found = cache.get(key)
    assert found in (None, key.encode() * 4000), key
    cache.put(key, key.encode() * 4000)
"""


def test_processes_share_a_folder(tmp_path: Path, start_python: Start) -> None:
    """Four processes put, read and trim the same entries: none sees another's half entry."""
    workers = [start_python(_HAMMER, tmp_path, seed) for seed in range(4)]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    assert not list((tmp_path / "cubins").glob(".new-*"))


def test_entries_that_were_swapped_are_not_believed(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cache")
    cubins, hashes = {"a": b"one", "b": b"two"}, {"a": "1" * 64, "b": "2" * 64}
    for key in "ab":
        cache.put(key, cubins[key])
        cache.remember(key, hashes[key])
    for folder, suffix in (("cubins", f".{FORMAT}.cubin"), ("specs", f".{FORMAT}")):
        first, second = (cache.folder / folder / f"{key}{suffix}" for key in "ab")
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    for key in "ab":
        assert cache.ptx_hash(key) is None
        with pytest.warns(CacheWarning, match="it is damaged"):
            assert cache.get(key) is None
