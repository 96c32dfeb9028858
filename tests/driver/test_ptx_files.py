"""Edited PTX in place of what a kernel generates, and folders of what was compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import DriverError, PtxLoadError
from urdir.driver.launch import launch, pack
from urdir.driver.ptx_files import PtxFiles
from urdir.ptxgen.kernels.add import Add

SPEC = Add(n=5)


def _sum(device: Device) -> list[float]:
    """What the kernel makes of 1, 2, 3 ... and ten times as much."""
    with (
        device.create_stream() as stream,
        device.arena(dict.fromkeys("aby", 20), "args") as arena,
    ):
        a = np.arange(1, 6, dtype=np.float32)
        arena["a"].upload(a)
        arena["b"].upload(10 * a)
        launch(device.load(SPEC), pack(SPEC, arena), stream)
        return [float(x) for x in arena["y"].download(np.float32)]


def _override(folder: Path, device: Device, old: str = "add.f32", new: str = "sub.f32") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{SPEC.key(device.target)}.ptx"
    path.write_text(SPEC.ptx(device.target).replace(old, new))
    return path


@pytest.fixture
def lines() -> list[str]:
    return []


def test_an_override_runs_and_is_reported(device: Device, tmp_path: Path, lines: list[str]) -> None:
    path = _override(tmp_path, device)
    files = PtxFiles(tmp_path, report=lines.append)
    with Device.open(device.name, ptx_files=files) as edited:
        assert _sum(edited) == [-9, -18, -27, -36, -45]
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert _sum(device) == [11, 22, 33, 44, 55]


def test_reports_go_to_stderr_by_default(
    emulator: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _override(tmp_path, emulator)
    with Device.open("emulator", ptx_files=PtxFiles(str(tmp_path))) as edited:
        edited.load(SPEC)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is used instead" in captured.err


def test_overrides_and_the_disk_cache_stay_apart(
    device: Device, tmp_path: Path, lines: list[str]
) -> None:
    """Neither does an override hide behind a cached cubin, nor does the cache remember it."""
    cache, folder = tmp_path / "cache", tmp_path / "edited"
    with Device.open(device.name, cache_folder=cache) as plain:
        assert _sum(plain)[0] == 11
    _override(folder, device)
    for _ in range(2):  # compiled, then from the disk
        files = PtxFiles(folder, report=lines.append)
        with Device.open(device.name, cache_folder=cache, ptx_files=files) as edited:
            assert _sum(edited)[0] == -9
    assert len(lines) == 2
    with Device.open(device.name, cache_folder=cache) as plain:
        assert _sum(plain)[0] == 11


def test_files_that_no_kernel_used_are_reported_once(
    emulator: Device, tmp_path: Path, lines: list[str]
) -> None:
    (tmp_path / "add-sm_90-0000.ptx").write_text("stale")
    (tmp_path / "notes.txt").write_text("of no concern")
    edited = Device.open("emulator", ptx_files=PtxFiles(tmp_path, report=lines.append))
    assert _sum(edited)[0] == 11
    edited.close()
    edited.close()
    assert len(lines) == 1
    assert "add-sm_90-0000.ptx" in lines[0]


def test_files_for_several_devices_report_once_and_at_the_end(
    emulator: Device, tmp_path: Path, lines: list[str]
) -> None:
    path = _override(tmp_path, emulator)
    (tmp_path / "add-sm_90-0000.ptx").write_text("stale")
    with PtxFiles(tmp_path, report=lines.append) as files:
        Device.open("emulator", ptx_files=files).close()
        assert lines == []
        for _ in range(2):
            with Device.open("emulator", ptx_files=files) as edited:
                assert _sum(edited)[0] == -9
        assert files.used == (path.name,)
        assert len(lines) == 1
    assert len(lines) == 2
    assert "1 of the files" in lines[1]
    assert "add-sm_90-0000.ptx" in lines[1]


def test_an_override_that_is_no_text_is_named(
    emulator: Device, tmp_path: Path, lines: list[str]
) -> None:
    path = _override(tmp_path, emulator)
    path.write_bytes(b"\xff\xfe")
    with (
        Device.open("emulator", ptx_files=PtxFiles(tmp_path, report=lines.append)) as edited,
        pytest.raises(DriverError, match=f"{path.name} cannot be read"),
    ):
        edited.load(SPEC)
    assert lines == []


def test_a_bad_override_fails_and_names_the_kernel(
    emulator: Device, tmp_path: Path, lines: list[str]
) -> None:
    path = _override(tmp_path, emulator, "add.f32", "frob.f32")
    with (
        Device.open("emulator", ptx_files=PtxFiles(tmp_path, report=lines.append)) as edited,
        pytest.raises(PtxLoadError, match="add"),
    ):
        edited.load(SPEC)
    assert str(path) in lines[0]  # which file it was


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DriverError, match="no folder"):
        PtxFiles(tmp_path / "absent")
    with pytest.raises(DriverError, match="no folder"):
        PtxFiles(tmp_path / "file")
    with pytest.raises(DriverError, match="cannot make"):
        PtxFiles(dump=tmp_path / "file" / "below")


def test_a_dump_has_what_was_loaded_even_from_the_cache(device: Device, tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"dump{number}"
        with Device.open(
            device.name, cache_folder=tmp_path / "cache", ptx_files=PtxFiles(dump=folder)
        ) as dumping:
            assert _sum(dumping)[0] == 11
        key = SPEC.key(device.target)
        assert (folder / f"{key}.ptx").read_text() == SPEC.ptx(device.target)
        cubin = folder / f"{key}.cubin"
        if device.is_emulated:
            assert not cubin.exists()
        else:
            assert cubin.read_bytes()[:4] == b"\x7fELF"


def test_a_dump_of_an_override_is_the_edited_text(
    emulator: Device, tmp_path: Path, lines: list[str]
) -> None:
    path = _override(tmp_path / "edited", emulator)
    files = PtxFiles(tmp_path / "edited", tmp_path / "dump", lines.append)
    with Device.open("emulator", ptx_files=files) as edited:
        edited.load(SPEC)
    (dumped,) = (tmp_path / "dump").iterdir()
    assert dumped.read_text() == path.read_text()
