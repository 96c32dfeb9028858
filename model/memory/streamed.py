"""Matrices in page-locked host memory or in files, in the device's layout, and the slots of device
memory in which they lie while they are used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from urdir.driver.memory import ALIGNMENT
from urdir.driver.operation import Launch
from urdir.driver.streamed import StreamedSlice
from urdir.model.errors import ModelError
from urdir.model.families.stored import Stored, StoredMatrix
from urdir.model.families.streaming import Streaming
from urdir.model.memory.layer_files import FileReader, InFile, LayerFile, ReadMatrix
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.ptxgen.weights.layout import Layout

Units = Sequence[tuple[StoredMatrix, ...]]

_SLOT = "slot of streamed layers"
#: Files of a control group: the most memory that it may have, what it has, and of what kinds;
#: those of cached files, which give way.
_GROUP = ("memory.max", "memory.current", "memory.stat")
_FILES = ("inactive_file ", "active_file ")
#: Host memory that is left to others.
_SPARE_BYTES = 1 << 30


class StreamedMatrices(Owner, Mapping[Stored, StreamedSlice]):
    """The slot of every matrix of ``units``, whose matrices are in a slot together; unit i takes
    turns with others in one of ``slots``. Matrices ``in_files``, with the bytes of each of their
    experts, have no host memory."""

    def __init__(
        self,
        device: Device,
        layouts: Mapping[StoredMatrix, Layout],
        units: Units,
        slots: Sequence[Slice],
        in_files: Mapping[StoredMatrix, int] = MappingProxyType({}),
    ) -> None:
        self._device, self._slots = device, slots
        #: Matrices that the slots hold together.
        self.groups: list[list[StoredMatrix]] = [
            [of for unit in units[at : at + len(slots)] for of in unit]
            for at in range(0, len(units), len(slots) or 1)
        ]
        self._places: dict[Stored, StreamedSlice] = {}
        self.nbytes = sum(layouts[of].nbytes for unit in units for of in unit)
        #: Files of layers, each with the matrices that it has.
        self.files: list[LayerFile] = []
        #: The matrices in files.
        self.in_files: dict[Stored, InFile] = {}
        for unit in units:
            sizes: dict[Stored, tuple[int, int]]
            sizes = {of: (layouts[of].nbytes, in_files[of]) for of in unit if of in in_files}
            if sizes:
                self.files.append(LayerFile(sizes))
                self.in_files |= self.files[-1].matrices
        with ExitStack() as owners:
            self.reader: FileReader | None = None
            #: Reads the experts that caches lack.
            self.expert_reader: FileReader | None = None
            if self.files:
                self.reader = owners.enter_context(FileReader(device, "layers", guesses=True))
            if any(each < layouts[of].nbytes for of, each in in_files.items()):
                experts = FileReader(device, "experts", guesses=False)
                self.expert_reader = owners.enter_context(experts)
            for number, unit in enumerate(units):
                slot = slots[number % len(slots)]
                offset = slot.offset
                for of in unit:
                    nbytes, name = layouts[of].nbytes, of.name
                    source = None
                    if of not in self.in_files:
                        source = owners.enter_context(device.pinned(nbytes, name))
                    place = StreamedSlice(slot.buffer, offset, nbytes, name, source)
                    if source is None:
                        place.transfer = self._read
                    self._places[of] = place
                    offset += _aligned(nbytes)
            self._owners = owners.pop_all()
        self._matrices = {place: of for of, place in self._places.items()}

    def _read(self, place: StreamedSlice) -> Launch:
        """What fills a slot from a file."""
        assert self.reader is not None
        work = ReadMatrix(self.reader, self.in_files[self._matrices[place]])
        return Launch(work, f"transfer {place.name}", {"target": place})

    def clear(self) -> None:
        """Fill the slots with zeros, as the padding of matrices is."""
        for slot in self._slots:
            slot.fill(0)

    def open_files(self, folder: Path, key_of: Callable[[Sequence[Stored]], str]) -> None:
        """Open the files that are in a folder already, each of matrices with a key. Raises
        ModelError where it has no room for the others."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise ModelError(f"the folder of weights {folder}: {error.strerror}") from None
        for file in self.files:
            file.open(folder, key_of([*file.matrices]))
        needed = sum(file.nbytes for file in self.files if not file.is_written)
        if needed > free:
            raise ModelError(
                f"not enough room in {folder}: {needed:,} bytes of weights would be written, "
                f"{free:,} are free: choose another folder, or leave more in memory"
            )

    def is_saved(self, of: Stored) -> bool:
        """Whether a matrix is in its file."""
        return of in self.in_files and self.in_files[of].is_written

    def save(self, matrices: Sequence[Stored]) -> None:
        """Copy matrices from their slots to host memory, or to files. Raises ModelError."""
        with self._device.create_stream("weights to the host") as stream:
            for of in matrices:
                place = self._places[of]
                if place.source is not None:
                    place.download_async(place.source, place.nbytes, 0, stream)
            stream.synchronize()
        for file in self.files:
            if not file.is_written and not file.matrices.keys().isdisjoint(matrices):
                file.write(self._places)

    def restore(self, matrices: Sequence[Stored]) -> None:
        """Copy matrices from their files to their slots."""
        assert self.reader is not None
        with self._device.create_stream("weights of files") as stream:
            self.reader.copy([(self.in_files[of], self._places[of]) for of in matrices], stream)
            stream.synchronize()

    def __getitem__(self, of: Stored) -> StreamedSlice:
        return self._places[of]

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Free the host memory. Idempotent."""
        self._owners.close()


def slot_sizes(
    units: Units, layouts: Mapping[StoredMatrix, Layout], streaming: Streaming | None
) -> dict[str, int]:
    """Bytes of the slots by name: each holds the largest unit."""
    if streaming is None or not units:
        return {}
    most = max(sum(_aligned(layouts[of].nbytes) for of in unit) for unit in units)
    return {f"{_SLOT} {number}": most for number in range(min(streaming.slots, len(units)))}


def slots_in(arena: Mapping[str, Slice]) -> list[Slice]:
    """The slots of an arena."""
    return [of for name, of in arena.items() if name.startswith(_SLOT)]


def host_available(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that are free without swapping, and that the control group permits; None
    where the system does not say."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    with suppress(OSError, ValueError):  # "max": no limit
        most, used, stat = ((root / "sys/fs/cgroup" / name).read_text() for name in _GROUP)
        files = (line.split() for line in stat.splitlines() if line.startswith(_FILES))
        found.append(max(0, int(most) - int(used) + sum(int(size) for _, size in files)))
    return min(found, default=None)


def host_room(limit: int | None) -> int | None:
    """Bytes of host memory that weights may have, up to a limit; None without a limit,
    where the system does not say what is free."""
    available = host_available()
    rooms = [] if available is None else [max(0, available - _SPARE_BYTES)]
    return min([*rooms, *([] if limit is None else [limit])], default=None)


def check_host(nbytes: int, room: int | None) -> None:
    """Raise ModelError where there is too little ``room`` in host memory for ``nbytes``."""
    if room is not None and nbytes > room:
        raise ModelError(
            f"not enough host memory: {nbytes:,} bytes of weights would be streamed from it, "
            f"{room:,} are available: leave more on the GPU, or in files (stream_dir)"
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
