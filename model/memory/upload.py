"""From a mapped file to repacked weights on the device, through bounded staging."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from urdir.driver.launch import launch, pack
from urdir.ptxgen.kernels.repack import Repack
from urdir.ptxgen.kernels.row_powers import RowPowers
from urdir.ptxgen.weights.expansion import expand
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Event
    from urdir.ptxgen.spec import KernelSpec

_SLOTS = 2
_SLOT_BYTES = 32 << 20
#: Threads that copy out of the file's mapping: one alone reaches a tenth of what PCIe takes.
_COPIERS = min(8, os.cpu_count() or 1)
#: Below this a copy is not worth dividing.
_LEAST_SHARE = 1 << 20
#: Device memory (and as much pinned host memory) in use while weights are loaded.
STAGING_BYTES = _SLOTS * _SLOT_BYTES

Bytes = npt.NDArray[np.uint8]


class Uploader:
    """Copies chunks into pinned memory, on to the device, and repacks them there. Where all of a
    matrix is repacked, its row powers are made.

    Two slots take turns, so that the host fills one while the device works on the other. A context
    manager; leaving it waits for the last chunk.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.create_stream("upload")
        names = [f"slot {i}" for i in range(_SLOTS)]
        self._staging = device.arena(dict.fromkeys(names, _SLOT_BYTES), "upload staging")
        self._pinned = [device.pinned(_SLOT_BYTES, name) for name in names]
        self._busy: list[Event | None] = [None] * _SLOTS
        self._next = 0
        self._copiers = ThreadPoolExecutor(_COPIERS, "upload")

    def matrix(self, layout: Layout, source: Bytes, destination: Slice) -> None:
        """Queue a GGUF tensor (its bytes) to be repacked into ``destination``."""
        destination.fill(0, self._stream)  # padding of the last tiles
        row_nbytes = layout.source_row_nbytes
        for first, rows in layout.chunks(_SLOT_BYTES):
            kernel = Repack(layout.format, rows, layout.cols)
            tiles = destination.slice(*layout.span(first, rows))
            chunk = expand(layout.format, source[first * row_nbytes : (first + rows) * row_nbytes])
            with self._stage(chunk) as staged:
                self._launch(kernel, source=staged, tiles=tiles)
        if layout.format.has_powers:
            powers = RowPowers(layout.format, layout.rows, layout.cols)
            self._launch(powers, weights=destination)

    def _launch(self, kernel: KernelSpec, **args: Slice) -> None:
        launch(self._device.load(kernel), pack(kernel, args), self._stream)

    def vector(self, source: Bytes, destination: Slice) -> None:
        """Queue a tensor that is kept as it is in the file."""
        for begin in range(0, len(source), _SLOT_BYTES):
            piece = source[begin : begin + _SLOT_BYTES]
            with self._stage(piece) as staged:
                destination.slice(begin, len(piece)).copy_from(staged, self._stream)

    @contextmanager
    def _stage(self, source: Bytes) -> Iterator[Slice]:
        """``source`` in the next slot's device memory; the slot is busy until the stream has done
        what is queued within.
        """
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        busy, pinned = self._busy[slot], self._pinned[slot]
        if busy is not None:
            busy.synchronize()
        self._copy(pinned.array[: len(source)], source)
        staging = self._staging[f"slot {slot}"]
        staging.upload_async(pinned, len(source), 0, self._stream)
        yield staging.slice(0, len(source))
        self._busy[slot] = self._stream.record(busy)

    def _copy(self, target: Bytes, source: Bytes) -> None:
        """``target[:] = source``, by several threads (numpy copies without the GIL)."""
        share = max(_LEAST_SHARE, -(-len(source) // _COPIERS))
        parts = [slice(at, at + share) for at in range(0, len(source), share)]
        if len(parts) == 1:
            np.copyto(target, source)
            return
        list(self._copiers.map(lambda part: np.copyto(target[part], source[part]), parts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._stream.synchronize()
        finally:
            self._copiers.shutdown()
            self._stream.close()
            self._staging.close()
            for pinned in self._pinned:
                pinned.close()
