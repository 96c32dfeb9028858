"""The cubin cache against other users of the machine and bad folders: no worse than a warning."""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from urdir.driver.cache import FORMAT, CacheWarning, CubinCache
from urdir.driver.device import Device
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX users and permissions")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)

SOMEBODY = 12345  # a user without a name, a home and rights
KERNEL = Normalise(rows=1, cols=64, norm=Norm("rms", 1e-5))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def refused(folder: Path, why: str) -> None:
    """The folder is not used, which costs one warning and nothing else."""
    before = {path: path.lstat().st_mtime_ns for path in folder.parent.rglob("*")}
    with (
        pytest.warns(CacheWarning, match=why) as caught,
        Device.open("emulator", cache_folder=folder) as device,
    ):
        device.load(KERNEL)
    assert len(caught) == 1
    assert {path: path.lstat().st_mtime_ns for path in folder.parent.rglob("*")} == before


def used(folder: Path) -> None:
    """The folder is used without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Device.open("emulator", cache_folder=folder) as device:
            device.load(KERNEL)
    assert len(list((folder / "emulator/cubins").iterdir())) == 1


# ---- the way to the folder ----


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    used(tmp_path / "a/b")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 5  # a, b, emulator, specs, cubins
    assert {mode(path) for path in folders} == {0o700}
    assert {mode(path) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


def test_a_folder_that_others_may_read_is_made_private(tmp_path: Path) -> None:
    (folder := tmp_path / "emulator").mkdir(mode=0o755)
    used(tmp_path)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("which", ["", "emulator", "emulator/specs", "emulator/cubins"])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, which: str, bits: int) -> None:
    used(cache := tmp_path / "cache")
    (cache / which).chmod(bits)
    refused(cache, f"{(cache / which)} is writable by other users")


def test_a_parent_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (parent := tmp_path / "a").mkdir()
    used(cache := parent / "b" / "cache")
    parent.chmod(0o777)
    refused(cache, "/a is writable by other users")
    parent.chmod(0o1777)  # as /tmp: others can neither rename nor delete what is ours
    used(cache)


@needs_root
@pytest.mark.parametrize("which", ["..", "", "emulator", "emulator/cubins"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, which: str) -> None:
    used(cache := tmp_path / "a" / "cache")
    os.chown(cache / which, SOMEBODY, -1)
    refused(cache, "belongs to another user")


@pytest.mark.parametrize("which", ["emulator", "emulator/cubins"])
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, which: str) -> None:
    used(cache := tmp_path / "cache")
    (cache / which).rename(elsewhere := tmp_path / "elsewhere")
    (cache / which).symlink_to(elsewhere)
    refused(cache, "cubins|emulator")


def test_a_link_above_is_followed_where_it_leads_to_a_safe_place(tmp_path: Path) -> None:
    (place := tmp_path / "disk" / "place").mkdir(parents=True)
    (tmp_path / "relative").symlink_to(Path("disk/../disk"))
    (link := tmp_path / "link").symlink_to(tmp_path / "relative/place")
    used(link / "cache")
    assert (place / "cache/emulator").is_dir()
    place.parent.chmod(0o777)
    refused(link / "cache", "disk is writable by other users")


@needs_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "place")
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    refused(link / "cache", "link belongs to another user")


def test_links_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    refused(tmp_path / "one" / "cache", "too many links")


# ---- folders that are no use ----


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "Not a directory")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/emulator").write_text("")
    refused(tmp_path / "cache", "Not a directory")


@pytest.fixture
def powerless() -> Iterator[Path]:
    """A folder of a user without rights, which the test is where it would be root."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        if root:
            os.chown(folder, SOMEBODY, -1)
            os.seteuid(SOMEBODY)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


def test_a_folder_that_cannot_be_made(powerless: Path) -> None:
    powerless.chmod(0o500)
    refused(powerless / "cache", "Permission denied")
    powerless.chmod(0o700)


def test_a_folder_that_is_read_only_serves_what_it_has(powerless: Path) -> None:
    used(powerless)
    for name in ("specs", "cubins"):
        (powerless / "emulator" / name).chmod(0o500)
    used(powerless)
    others = [Normalise(rows=1, cols=cols, norm=Norm("rms", 1e-5)) for cols in (65, 66, 67)]
    with (
        pytest.warns(CacheWarning, match="cannot write .*Permission denied") as caught,
        Device.open("emulator", cache_folder=powerless) as device,
    ):
        device.load_all(others)
    assert len(caught) == 1
    for name in ("specs", "cubins"):
        (powerless / "emulator" / name).chmod(0o700)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(user: int) -> None:
        raise KeyError(user)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    refused(Path("~/.cache/urdir"), "no home folder")
    assert not list(tmp_path.iterdir())


# ---- entries ----

Plant = Callable[[Path], None]


def _by_a_link(path: Path) -> None:
    path.rename(other := path.parent.parent / "planted")
    path.symlink_to(other)


def _by_another_user(path: Path) -> None:
    os.chown(path, SOMEBODY, -1)


def _as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("kind", ["specs", "cubins"])
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda path: path.chmod(0o666), "writable by other users"),
        (lambda path: path.chmod(0o620), "writable by other users"),
        (_by_a_link, "cannot read"),
        pytest.param(_by_another_user, "belongs to another user", marks=needs_root),
        (_as_a_pipe, "not a regular file"),
    ],
)
def test_a_planted_entry_is_never_read(tmp_path: Path, kind: str, plant: Plant, why: str) -> None:
    """All of them would be taken for what their names say; the next process has good ones again."""
    used(tmp_path)
    (entry,) = (tmp_path / "emulator" / kind).iterdir()
    whole = entry.read_bytes()
    plant(entry)
    with (
        pytest.warns(CacheWarning, match=why) as caught,
        Device.open("emulator", cache_folder=tmp_path) as device,
    ):
        device.load(KERNEL)
    assert len(caught) == 1
    assert entry.read_bytes() == whole
    assert mode(entry) == 0o600
    used(tmp_path)


def test_a_folder_in_place_of_an_entry(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    (tmp_path / f"cubins/k.{FORMAT}.cubin").mkdir()
    with pytest.warns(CacheWarning, match=r"cannot read .*k\.\d+\.cubin"):
        assert cache.get("k") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("k", b"cubin")  # has been said


def test_no_temporary_file_is_left_by_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    cache = CubinCache(tmp_path)
    monkeypatch.setattr("os.replace", fail)
    with pytest.warns(CacheWarning, match="disk full"):
        cache.put("k", b"cubin")
    assert list((tmp_path / "cubins").iterdir()) == []
