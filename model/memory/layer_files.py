"""Weights that stay in files, in the device's layout: a file for each layer, which is written once
and read again before each use, ahead of it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.errors import HostWorkError
from urdir.driver.host_work import HostWork
from urdir.driver.memory import Region
from urdir.model.errors import ModelError
from urdir.model.files.open_file import OpenFile
from urdir.model.owner import Owner
from urdir.ptxgen.ptx.launch import Access, Param

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.operation import Memory
    from urdir.driver.pinned import PinnedBuffer
    from urdir.driver.stream import Event, Stream
    from urdir.model.families.stored import Stored
    from urdir.model.files.open_file import Bytes

#: Bytes that are read, and checked, at once.
PIECE_BYTES = 8 << 20
#: Pieces that are read ahead, and threads that read.
AHEAD, _THREADS = 8, 4
#: Page-locked host memory of a `FileReader`.
READER_BYTES = AHEAD * PIECE_BYTES
_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` of a file from ``offset`` on, with a digest of their own."""

    file: LayerFile
    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InFile:
    """A matrix in a file, or a part of it that is made of whole pieces."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def is_written(self) -> bool:
        """Whether it can be read."""
        return all(piece.file.is_written for piece in self.pieces)

    def slice(self, offset: int, nbytes: int) -> InFile:
        """The pieces of the bytes ``offset`` to ``offset`` + ``nbytes``."""
        first = self.pieces[0].offset + offset
        inside = (of for of in self.pieces if first <= of.offset < first + nbytes)
        found = InFile(self.name, tuple(inside))
        assert found.nbytes == nbytes, f"{self.name}: pieces end elsewhere"
        return found


class LayerFile:
    """The matrices of a layer, one after the other, then a digest of each piece, and one of these.

    ``sizes`` are the bytes of each matrix, and of each of its experts, whose pieces are apart. It
    has no contents until it is opened, or written.
    """

    def __init__(self, sizes: Mapping[Stored, tuple[int, int]]) -> None:
        self.matrices: dict[Stored, InFile] = {}
        self._pieces: list[Piece] = []
        self.nbytes = 0
        for of, (nbytes, each) in sizes.items():
            cuts = [
                Piece(self, len(self._pieces) + number, self.nbytes + at, length)
                for number, (at, length) in enumerate(_cuts(nbytes, each))
            ]
            self.matrices[of] = InFile(of.name, tuple(cuts))
            self._pieces += cuts
            self.nbytes += nbytes
        self._path, self._key = Path(), b""
        self._file: OpenFile | None = None
        self._digests: list[bytes] = []
        self._is_checked = bytearray(len(self._pieces))

    @property
    def is_written(self) -> bool:
        """Whether it can be read."""
        return self._file is not None

    def open(self, folder: Path, key: str) -> None:
        """Open the file of a ``key`` in a folder, if a whole one is there. Raises ModelError for
        one that cannot be read."""
        self._path, self._key = folder / f"{key}.weights", key.encode()
        whole = self.nbytes + _DIGEST * (len(self._pieces) + 1)
        try:
            if self._path.stat().st_size != whole:
                return
        except OSError:
            return  # writing it reports what is wrong
        file = OpenFile(self._path, "a file of weights", ModelError)
        text = file.read(self.nbytes, whole).tobytes()
        digests = [text[at : at + _DIGEST] for at in range(0, len(text), _DIGEST)]
        if digests.pop() == self._digest_of(digests):
            self._file, self._digests = file, digests

    def write(self, places: Mapping[Stored, Region]) -> None:
        """Write the matrices from the device, and open the file. Raises ModelError."""
        temporary = self._path.with_name(f".new-{os.urandom(8).hex()}")
        digests = []
        try:
            with temporary.open("xb") as file:
                for of, matrix in self.matrices.items():
                    first = matrix.pieces[0].offset
                    for piece in matrix.pieces:
                        place = places[of].slice(piece.offset - first, piece.nbytes)
                        data = place.download(np.uint8)
                        file.write(data.data)
                        digests.append(_digest(data))
                file.write(b"".join([*digests, self._digest_of(digests)]))
            temporary.replace(self._path)
        except OSError as error:
            raise ModelError(f"{self._path}: weights cannot be written: {error.strerror}") from None
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        self._file = OpenFile(self._path, "a file of weights", ModelError)
        self._digests = digests

    def read(self, piece: Piece, into: Bytes) -> None:
        """Read a piece, and check it if it is the first time. Thread-safe. Raises ModelError."""
        assert self._file is not None
        self._file.read_into(piece.offset, into)
        if not self._is_checked[piece.number]:
            if _digest(into) != self._digests[piece.number]:
                raise ModelError(
                    f"{self._path}: bytes from {piece.offset:,} on are not those that were "
                    "written: delete the file, it is written again when the model is opened"
                )
            self._is_checked[piece.number] = True

    def _digest_of(self, digests: Sequence[bytes]) -> bytes:
        return blake2b(b"".join([self._key, *digests]), digest_size=_DIGEST).digest()


class FileReader(Owner):
    """Copies pieces of files to the device through page-locked memory, where threads read those
    that come next; with ``guesses`` also those that came next the last time.

    A failure ends it, as what was queued before may have changed states, or what caches are said
    to hold: every later copy fails.
    """

    def __init__(self, device: Device, name: str, *, guesses: bool) -> None:
        self._pinned: PinnedBuffer = device.pinned(READER_BYTES, name)
        self._threads = ThreadPoolExecutor(_THREADS, name)
        self._guesses = guesses
        self._next: dict[Piece, Piece] = {}
        self._last: Piece | None = None
        self._begun: deque[tuple[Piece, int, Future[None]]] = deque()
        self._free = deque(range(AHEAD))
        self._busy: list[Event | None] = [None] * AHEAD
        self._failed: BaseException | None = None

    def copy(self, copies: Sequence[tuple[InFile, Region]], stream: Stream) -> None:
        """Queue copies from files to the device, once their bytes are read. Raises DriverError."""
        with self.use():
            self._copy(copies, stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """A failure within ends the reader. Raises DriverError, also of an earlier one."""
        if self._failed is not None:
            why = str(self._failed) or type(self._failed).__name__
            raise HostWorkError(f"weights could not be read before: {why}")
        try:
            yield
        except ModelError as error:
            self._failed = HostWorkError(f"weights cannot be read: {error}")
            raise self._failed from error
        except BaseException as error:
            self._failed = error
            raise

    def _copy(self, copies: Sequence[tuple[InFile, Region]], stream: Stream) -> None:
        wanted = [
            (piece, target.slice(piece.offset - source.pieces[0].offset, piece.nbytes))
            for source, target in copies
            for piece in source.pieces
        ]
        pieces = [piece for piece, _ in wanted]
        for number, (piece, target) in enumerate(wanted):
            self._begin(pieces[number : number + AHEAD])
            _, slot, done = self._begun.popleft()
            self._free.append(slot)
            done.result()
            target.upload_async(self._pinned, piece.nbytes, 0, stream, slot * PIECE_BYTES)
            self._busy[slot] = stream.record(self._busy[slot])
            if self._last is not None and self._guesses:
                self._next[self._last] = piece
            self._last = piece
        self._begin([])

    def _begin(self, pieces: Sequence[Piece]) -> None:
        """Have ``pieces`` read next, in this order; others may be read after them."""
        same = 0
        for (piece, _, _), wanted in zip(self._begun, pieces, strict=False):
            if piece is not wanted:
                break
            same += 1
        while len(self._begun) > same and same < len(pieces):
            _, slot, done = self._begun.pop()
            if not done.cancel():
                done.exception()
            self._free.append(slot)
        for piece in self._following(pieces):
            if not self._free:
                break
            slot = self._free.popleft()
            self._begun.append((piece, slot, self._threads.submit(self._read, piece, slot)))

    def _following(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """The pieces after those that have begun."""
        yield from pieces[len(self._begun) :]
        last = self._begun[-1][0] if self._begun else self._last
        while last is not None and (last := self._next.get(last)) is not None:
            yield last

    def _read(self, piece: Piece, slot: int) -> None:
        if (busy := self._busy[slot]) is not None:
            busy.synchronize()
        at = slot * PIECE_BYTES
        piece.file.read(piece, self._pinned.array[at : at + piece.nbytes])

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self._pinned.close()


class ReadMatrix(HostWork):
    """A slot of device memory filled from a file."""

    name = "read_file"

    def __init__(self, reader: FileReader, source: InFile) -> None:
        self._reader, self._source = reader, source
        self._target = Param("target", "u8", (source.nbytes,), Access.OUT)

    @property
    def params(self) -> Sequence[Param]:
        """The slot."""
        return (self._target,)

    def perform(self, args: Mapping[str, Memory], stream: Stream) -> None:
        """Queue copies of what is read."""
        target = args["target"]
        assert isinstance(target, Region)
        self._reader.copy([(self._source, target)], stream)


def _cuts(nbytes: int, each: int) -> Iterator[tuple[int, int]]:
    """Where pieces begin, and how long they are."""
    for start in range(0, nbytes, each):
        stop = min(start + each, nbytes)
        for at in range(start, stop, PIECE_BYTES):
            yield at, min(PIECE_BYTES, stop - at)


def _digest(data: Bytes) -> bytes:
    return blake2b(data.data, digest_size=_DIGEST).digest()
