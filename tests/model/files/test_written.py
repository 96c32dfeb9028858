"""Files that are written whole, or not at all."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import numpy as np
import pytest

from urdir.model.errors import ModelError
from urdir.model.files.written import whole_file


def test_a_file_has_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with whole_file(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to("target")
    with whole_file(link) as part:
        part.write_text("x")
    assert (link.is_symlink(), target.read_text()) == (True, "x")


def _write(path: Path, error: type[BaseException]) -> None:
    with whole_file(path) as part:
        part.write_text("aft")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_happens_what_was_there_stays(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(error):
        _write(path, error)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def _save(path: Path, most: int) -> None:
    """Write a large array where no file may have more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with whole_file(path, "--output ") as part, part.open("wb") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            np.save(file, np.zeros(1 << 16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_cannot_be_written_to_is_named_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system that is read only, not even files that are not there can be removed."""
    denied = OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(denied))
    path = tmp_path / "out"
    with pytest.raises(ModelError) as caught, whole_file(path):
        raise denied
    assert str(caught.value) == f"{path}: cannot be written: Read-only file system"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """numpy's own error has no reason; a limit of a file's size fails as a full disk does."""
    path = tmp_path / "out.npy"
    with pytest.raises(ModelError) as caught:
        _save(path, 4096)
    message = str(caught.value)
    assert message.startswith(f"--output {path}: cannot be written: ")
    assert "None" not in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "message"), [("no/out", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_opened(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / name
    with pytest.raises(ModelError, match=message), whole_file(path) as part:
        part.write_text("x")


def test_devices_are_written_as_they_are() -> None:
    with whole_file(Path("/dev/null")) as part:
        part.write_text("x")
    assert Path("/dev/null").is_char_device()
    full = whole_file(Path("/dev/full"))
    with pytest.raises(ModelError, match="No space left"), full as part, part.open("w") as file:
        file.write("x")
