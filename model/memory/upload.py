"""Upload and repacking of weights, in threads, through bounded staging memory.

The data is uploaded in pieces. A thread reads a piece into page-locked memory and queues the copy
to the device and the processing there. It has two slots, so that it fills one while the device
works on the other. Reads, numpy copies and driver calls release the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.launch import launch, pack
from urdir.model.memory.quantising import FloatRows, Quantising, quantise_spec
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.quantise import Quantise
from urdir.ptxgen.kernels.repack import Repack
from urdir.ptxgen.kernels.row_powers import RowPowers
from urdir.ptxgen.kernels.row_scales import RowScales
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout, recoded

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.module import LoadedKernel
    from urdir.driver.stream import Event, Stream
    from urdir.ptxgen.spec import KernelSpec
    from urdir.ptxgen.weights.format import Format

_SLOTS = 2
#: Eight threads that only copy reached 50 GB/s with slots of 4 MB, 48 with 8 MB, 32 with 32 MB. In
#: a whole start, four threads or one slot of 16 MB each made no difference above noise.
_SLOT_BYTES = 8 << 20
#: On an H200 one thread gets 7.5 GB/s out of the page cache, four 29, eight 48 (PCIe takes 55).
_LANES = 8
#: Device memory (and the same amount of pinned host memory) in use while weights are loaded.
STAGING_BYTES = _LANES * _SLOTS * _SLOT_BYTES

Bytes = npt.NDArray[np.uint8]


class Piece(Protocol):
    """Part of a tensor to be uploaded."""

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""

    def read(self, into: Bytes) -> int:
        """Write the data to a slot; returns its size in bytes. Called in a thread."""

    def place(self, staged: Slice, stream: Stream) -> None:
        """Queue the work that moves the data from the start of ``staged``, a slot, to its place."""


@dataclass(frozen=True, slots=True)
class _Band:
    """Rows of a matrix, repacked on the device; floats are quantised there before."""

    loaded: LoadedKernel
    layout: Layout
    first: int
    rows: int
    source: Any
    destination: Slice
    quantising: Quantising | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row that is read."""
        of = self.quantising
        return self.layout.source_row_nbytes if of is None else of.floats.source_row_nbytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes

    def read(self, into: Bytes) -> int:
        begin, fmt = self.first * self.row_nbytes, self.layout.format
        read_into = getattr(self.source, "read_into", None)
        if read_into is not None and not fmt.recoded:
            read_into(begin, into[: self.nbytes])
            return self.nbytes
        return _copy(recoded(fmt, self.source[begin : begin + self.nbytes]), into)

    def place(self, staged: Slice, stream: Stream) -> None:
        tiles = self.destination.slice(*self.layout.span(self.first, self.rows))
        if self.quantising is not None:
            staged = self.quantising.queue(self.rows, staged, stream)
        _launch(self.loaded, stream, source=staged, tiles=tiles)


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes uploaded without conversion."""

    source: Bytes
    destination: Slice

    @property
    def nbytes(self) -> int:
        return len(self.source)

    def read(self, into: Bytes) -> int:
        return _copy(self.source, into)

    def place(self, staged: Slice, stream: Stream) -> None:
        self.destination.copy_from(staged.slice(0, self.nbytes), stream)


def _copy(data: Bytes, into: Bytes) -> int:
    np.copyto(into[: len(data)], data)
    return len(data)


class Repacking:
    """The kernels of some matrices, compiled in threads if necessary: layouts, and the type of the
    floats that are quantised on the way, or None. Rows of some are ``scaled`` for products of
    bytes."""

    def __init__(
        self,
        device: Device,
        matrices: Iterable[tuple[Layout, Format | None]],
        scaled: Collection[Layout] = (),
    ) -> None:
        self._device = device
        specs: dict[tuple[type[KernelSpec], str, int, int], KernelSpec] = {}
        for layout, floats in matrices:
            fmt, cols = layout.format, layout.cols
            for rows in {rows for _, rows in _chunks(layout, floats)}:
                specs[Repack, fmt.name, rows, cols] = Repack(fmt, rows, cols)
            if floats is not None:
                specs[Quantise, f"{fmt.name} {floats.name}", 0, cols] = quantise_spec(
                    fmt, floats, 1, cols
                )
            if fmt.has_powers:
                specs[RowPowers, fmt.name, layout.rows, cols] = RowPowers(fmt, layout.rows, cols)
            if layout in scaled:
                specs[RowScales, fmt.name, layout.rows, cols] = RowScales(fmt, layout.rows, cols)
        loaded = device.load_all([*specs.values()])
        self._kernels = dict(zip(specs, loaded, strict=True))

    def pieces(self, layout: Layout, source: Any, destination: Slice) -> Iterator[Piece]:
        """Pieces of a GGUF tensor (its bytes, or `FloatRows`), to be repacked into ``destination``,
        which holds zeros."""
        name, floats, quantising = layout.format.name, None, None
        if isinstance(source, FloatRows):
            floats, source = source.format, source.data
            loaded = self._kernels[Quantise, f"{name} {floats.name}", 0, layout.cols]
            quantising = Quantising(loaded, layout.format, as_read(layout, floats))
        for first, rows in _chunks(layout, floats):
            loaded = self._kernels[Repack, name, rows, layout.cols]
            yield _Band(loaded, layout, first, rows, source, destination, quantising)

    def add_powers(self, matrices: Iterable[tuple[Layout, Slice, Slice | None]]) -> None:
        """Compute the row powers of fully uploaded matrices, and the row scales of some."""
        with self._device.create_stream("row powers") as stream:
            for layout, weights, scales in matrices:
                shape = layout.format.name, layout.rows, layout.cols
                if layout.format.has_powers:
                    _launch(self._kernels[RowPowers, *shape], stream, weights=weights)
                if scales is not None:
                    kernel = self._kernels[RowScales, *shape]
                    _launch(kernel, stream, weights=weights, scales=scales)
            stream.synchronize()


def kernels_of(layout: Layout, floats: Format | None) -> list[KernelSpec]:
    """The kernels that make the bytes of a matrix; the texts of the first two are those of any
    number of rows."""
    fmt, cols = layout.format, layout.cols
    made: list[KernelSpec] = [Repack(fmt, TILE_ROWS, cols)]
    made += [] if floats is None else [quantise_spec(fmt, floats, 1, cols)]
    return made + ([RowPowers(fmt, layout.rows, cols)] if fmt.has_powers else [])


def as_read(layout: Layout, floats: Format | None) -> Layout:
    """The layout of a matrix as it is read: of its type, or of the ``floats`` that become it."""
    return layout if floats is None else Layout(floats, layout.rows, layout.cols)


def _chunks(layout: Layout, floats: Format | None) -> Iterator[tuple[int, int]]:
    """(first row, rows) of the pieces of a matrix, for which a slot has room: of floats with their
    blocks behind them, which have 9/16 as many bytes at most."""
    return as_read(layout, floats).chunks(_SLOT_BYTES if floats is None else _SLOT_BYTES * 5 // 8)


def _launch(loaded: LoadedKernel, stream: Stream, **args: Slice) -> None:
    launch(loaded, pack(loaded.kernel, args), stream)


def vector_pieces(source: Bytes, destination: Slice) -> Iterator[Piece]:
    """Pieces of a tensor that is stored unchanged."""
    for begin in range(0, len(source), _SLOT_BYTES):
        part = source[begin : begin + _SLOT_BYTES]
        yield _Part(part, destination.slice(begin, len(part)))


def upload(
    device: Device,
    pieces: Iterable[Piece],
    nbytes: int,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
    stop: threading.Event | None = None,
) -> None:
    """Upload all ``pieces``, about ``nbytes`` together, and wait for completion.

    ``progress`` receives the bytes of each. After ``stop`` is set no further piece is taken. An
    error in any thread, or Ctrl-C, stops all of them and is raised; staging memory is always freed.
    """
    taken = _Taken(iter(pieces), progress, stop or threading.Event())
    lanes = min(_LANES, -(-nbytes // (_SLOTS * _SLOT_BYTES)) or 1)

    def work(number: int) -> None:
        try:
            with _Lane(device, f"upload {number}") as lane:
                lane.send(taken)
        except BaseException:
            taken.stop.set()
            raise

    with ThreadPoolExecutor(lanes, "upload") as threads:
        try:
            for done in [threads.submit(work, number) for number in range(lanes)]:
                done.result()
        except BaseException:
            taken.stop.set()
            raise


class _Taken:
    """The pieces, each given to one thread."""

    def __init__(
        self, pieces: Iterator[Piece], progress: Callable[[int], None], stop: threading.Event
    ) -> None:
        self.stop = stop
        self._pieces = pieces
        self._progress = progress
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Piece]:
        """Pieces for one of the threads, until none are left."""
        while (piece := self._next()) is not None:
            yield piece
            with self._lock:
                self._progress(piece.nbytes)

    def _next(self) -> Piece | None:
        with self._lock:
            return None if self.stop.is_set() else next(self._pieces, None)


class _Lane(Owner):
    """One thread's stream and slots. ``close`` waits for the device."""

    def __init__(self, device: Device, name: str) -> None:
        with ExitStack() as owners:
            self._stream = owners.enter_context(device.create_stream(name))
            nbytes = _SLOTS * _SLOT_BYTES
            self._staging = owners.enter_context(device.allocate(nbytes, f"{name} staging"))
            self._pinned = owners.enter_context(device.pinned(nbytes, name))
            self._owners = owners.pop_all()
        self._busy: list[Event | None] = [None] * _SLOTS

    def send(self, pieces: Iterable[Piece]) -> None:
        """Copy pieces through the slots to the device and to their places."""
        host = self._pinned.array
        for number, piece in enumerate(pieces):
            slot = number % _SLOTS
            at = slot * _SLOT_BYTES
            if (busy := self._busy[slot]) is not None:
                busy.synchronize()
            nbytes = piece.read(host[at : at + _SLOT_BYTES])
            self._staging.upload_async(self._pinned, nbytes, at, self._stream, at)
            piece.place(self._staging.slice(at, _SLOT_BYTES), self._stream)
            self._busy[slot] = self._stream.record(busy)
        self._stream.synchronize()

    def close(self) -> None:
        """Free the slots. Idempotent."""
        self._owners.close()
