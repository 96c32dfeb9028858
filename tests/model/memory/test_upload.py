"""Matrices of every type on their way to the device, in pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.driver.stream import Stream
from urdir.model.memory import upload
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout


@pytest.mark.parametrize(
    "fmt",
    [
        fmt
        for name, fmt in FORMATS.items()
        if (fmt.table or fmt.grid or fmt.has_e4m3_factors)
        and name in gguf.GGMLQuantizationType.__members__
    ],
    ids=lambda fmt: fmt.name,
)
def test_what_lies_on_the_device_is_ggufs_dequantisation(
    device_name: str, monkeypatch: pytest.MonkeyPatch, fmt: Format
) -> None:
    """In three pieces."""
    layout = Layout(fmt, 35, 768)
    monkeypatch.setattr(upload, "_SLOT_BYTES", 16 * layout.source_row_nbytes)
    assert [rows for _, rows in layout.chunks(16 * layout.source_row_nbytes)] == [16, 16, 3]
    blocks = random_blocks(fmt, 35 * 768 // fmt.block, np.random.default_rng(1))
    with Device.open(device_name) as device, device.arena({"m": layout.nbytes}, "w") as arena:
        arena["m"].fill(0)
        repacking = upload.Repacking(device, [(layout, None)])
        pieces = repacking.pieces(layout, blocks.reshape(-1), arena["m"])
        upload.upload(device, pieces, blocks.nbytes)
        repacking.add_powers([(layout, arena["m"], None)])
        weights = layout.unpack(arena["m"].download(np.uint8))
    kind = gguf.GGMLQuantizationType[fmt.name]
    np.testing.assert_array_equal(weights, gguf.quants.dequantize(blocks.reshape(35, -1), kind))


# ---- ends before the end ----


@dataclass
class Piece:
    """Eight bytes; ``read`` may do something else."""

    destination: Slice
    read: Any = lambda into: into[:8].fill(1) or 8
    nbytes: int = 8

    def place(self, staged: Slice, stream: Stream) -> None:
        self.destination.copy_from(staged.slice(0, 8), stream)


@pytest.fixture
def threads() -> Iterator[None]:
    """No thread may be left over."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def fail(into: object) -> Any:
    raise ValueError("unreadable")


def interrupt(into: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("read", "error"), [(fail, ValueError), (interrupt, KeyboardInterrupt)])
def test_a_piece_that_fails_ends_all_threads_and_frees_the_staging(
    device_name: str, monkeypatch: pytest.MonkeyPatch, read: Any, error: type[BaseException]
) -> None:
    monkeypatch.setattr(upload, "_SLOT_BYTES", 64)
    taken = []

    def pieces(arena: Any) -> Iterator[Piece]:
        for number in range(10_000):
            taken.append(number)
            yield Piece(arena["m"], read) if number == 20 else Piece(arena["m"])

    with Device.open(device_name) as device, device.arena({"m": 8}, "w") as arena:
        free, _ = device.memory_info()
        with pytest.raises(error):
            upload.upload(device, pieces(arena), 80_000)
        device.synchronize()
        if device.is_emulated:  # a GPU's driver keeps some for itself
            assert device.memory_info()[0] == free
        assert arena["m"].download(np.uint8).tolist() == [1] * 8
    assert len(taken) < 10_000


@pytest.mark.usefixtures("threads")
def test_an_upload_can_be_stopped(device_name: str) -> None:
    stop = threading.Event()
    with Device.open(device_name) as device, device.arena({"m": 8}, "w") as arena:
        pieces = iter([Piece(arena["m"]) for _ in range(9)])
        told: list[int] = []

        def progress(nbytes: int) -> None:
            told.append(nbytes)
            if len(told) == 3:
                stop.set()

        upload.upload(device, pieces, 72, progress=progress, stop=stop)
        assert told == [8, 8, 8]
        assert len(list(pieces)) == 6
