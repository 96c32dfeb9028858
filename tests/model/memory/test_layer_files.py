"""Weights in files: written once, read ahead in the order of the last time, checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import HostWorkError
from urdir.driver.memory import Region
from urdir.model.errors import ModelError
from urdir.model.families.stored import StoredMatrix
from urdir.model.memory import layer_files
from urdir.model.memory.layer_files import FileReader, InFile, LayerFile, Piece

PIECE = 64
#: Bytes of each matrix, and of its experts.
SIZES = ((200, 200), (64, 64), (3 * 80 + 10, 80), (17, 17))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_files, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(layer_files, "READER_BYTES", PIECE * layer_files.AHEAD)


def matrices(layer: int) -> list[StoredMatrix]:
    return [
        StoredMatrix.whole(f"blk.{layer}.{number}.weight", (1, 1)) for number in range(len(SIZES))
    ]


class Files:
    """Three layers in files, their bytes, and a device's memory for them."""

    def __init__(self, device: Device, folder: Path) -> None:
        rng = np.random.default_rng(1)
        self.folder, self.values = folder, dict[str, Any]()
        self.files, self.sources = list[LayerFile](), list[InFile]()
        self.memory = device.allocate(4096, "memory")
        for layer in range(3):
            file = LayerFile(dict(zip(matrices(layer), SIZES, strict=True)))
            self.files.append(file)
            self.sources += file.matrices.values()
            file.open(folder, f"layer{layer}")
            places: dict[Any, Region] = {}
            for number, (of, matrix) in enumerate(file.matrices.items()):
                data = rng.integers(0, 256, matrix.nbytes, np.uint8)
                self.values[of.name] = data
                places[of] = self.memory.slice(256 * number, matrix.nbytes)
                places[of].upload(data)
            if not file.is_written:
                file.write(places)

    def read(self, reader: FileReader, source: InFile, stream: Any) -> Any:
        """The bytes that come to the device."""
        target = self.memory.slice(2048, source.nbytes)
        reader.copy([(source, target)], stream)
        stream.synchronize()
        return target.download(np.uint8)


@pytest.fixture
def files(device: Device, tmp_path: Path) -> Iterator[Files]:
    found = Files(device, tmp_path)
    yield found
    found.memory.close()


@pytest.mark.parametrize("guesses", [True, False])
def test_what_was_written_is_read_in_any_order(guesses: bool, device: Device, files: Files) -> None:
    order = np.random.default_rng(0).integers(0, len(files.sources), 40).tolist()
    with (
        FileReader(device, "reader", guesses=guesses) as reader,
        device.create_stream() as stream,
    ):
        for number in [*order, *range(len(files.sources)), *range(len(files.sources))]:
            source = files.sources[number]
            found = files.read(reader, source, stream)
            np.testing.assert_array_equal(found, files.values[source.name])


def test_experts_are_apart(device: Device, files: Files) -> None:
    source = files.sources[2]
    assert [piece.nbytes for piece in source.pieces] == [64, 16, 64, 16, 64, 16, 10]
    expert = source.slice(80, 80)
    with (
        FileReader(device, "reader", guesses=False) as reader,
        device.create_stream() as stream,
    ):
        found = files.read(reader, expert, stream)
    np.testing.assert_array_equal(found, files.values[source.name][80:160])


def test_what_came_next_the_last_time_is_read_ahead(
    device: Device, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second pass on each piece has begun before it is needed, and no other."""
    read: list[Piece] = []
    plain = LayerFile.read
    monkeypatch.setattr(
        LayerFile, "read", lambda self, piece, into: (read.append(piece), plain(self, piece, into))
    )
    passes, pieces = 4, [piece for source in files.sources for piece in source.pieces]
    with (
        FileReader(device, "reader", guesses=True) as reader,
        device.create_stream() as stream,
    ):
        for number, source in enumerate(files.sources * passes):
            if number > len(files.sources):
                assert reader._begun[0][0] is source.pieces[0]
            files.read(reader, source, stream)
    assert len(pieces) > layer_files.AHEAD
    assert passes * len(pieces) <= len(read) <= passes * len(pieces) + layer_files.AHEAD


def test_a_file_that_is_there_is_not_written_again(
    device: Device, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerFile, "write", lambda *_: pytest.fail("written again"))
    again = Files(device, files.folder)
    assert all(file.is_written for file in again.files)
    again.memory.close()


@pytest.mark.parametrize("damage", ["empty", "short", "digests", "another model"])
def test_a_file_that_is_not_whole_is_written_again(
    damage: str, device: Device, files: Files
) -> None:
    path = files.folder / "layer1.weights"
    data = bytearray(path.read_bytes())
    if damage == "empty":  # after a power failure
        data.clear()
    elif damage == "short":
        del data[-1:]
    elif damage == "digests":
        data[-20] ^= 1
    else:
        data[:] = (files.folder / "layer0.weights").read_bytes()
    path.write_bytes(data)
    file = LayerFile(dict(zip(matrices(1), SIZES, strict=True)))
    file.open(files.folder, "layer1")
    assert not file.is_written


def test_a_byte_that_has_changed_is_found_and_ends_the_reader(device: Device, files: Files) -> None:
    path = files.folder / "layer1.weights"
    data = bytearray(path.read_bytes())
    data[70] ^= 4  # in the second piece
    path.write_bytes(data)
    file = LayerFile(dict(zip(matrices(1), SIZES, strict=True)))
    file.open(files.folder, "layer1")
    source = next(iter(file.matrices.values()))
    with (
        FileReader(device, "reader", guesses=True) as reader,
        device.create_stream() as stream,
    ):
        np.testing.assert_array_equal(
            files.read(reader, source.slice(0, 64), stream), files.values[source.name][:64]
        )
        with pytest.raises(HostWorkError, match="bytes from 64 on are not those"):
            files.read(reader, source, stream)
        with pytest.raises(HostWorkError, match="could not be read before"):
            files.read(reader, files.sources[0], stream)


def test_a_file_that_changes_while_it_is_used(device: Device, files: Files) -> None:
    (files.folder / "layer0.weights").write_bytes(b"abc")
    with (
        FileReader(device, "reader", guesses=True) as reader,
        device.create_stream() as stream,
        pytest.raises(HostWorkError, match="was changed while it was in use"),
    ):
        files.read(reader, files.sources[0], stream)


def test_a_file_that_cannot_be_written_leaves_nothing(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(ModelError, match="cannot be written: No space left"):
        Files(device, tmp_path)
    assert not [*tmp_path.iterdir()]
