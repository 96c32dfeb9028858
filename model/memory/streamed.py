"""Matrices in page-locked host memory, in the device's layout, and the slots of device memory in
which they lie while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.driver.memory import ALIGNMENT
from urdir.driver.streamed import StreamedSlice
from urdir.model.errors import ModelError
from urdir.model.families.stored import Stored, StoredMatrix
from urdir.model.families.streaming import Streaming
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
    turns with others in one of ``slots``."""

    def __init__(
        self,
        device: Device,
        layouts: Mapping[StoredMatrix, Layout],
        units: Units,
        slots: Sequence[Slice],
    ) -> None:
        self._device, self._slots = device, slots
        #: Matrices that the slots hold together.
        self.groups: list[list[StoredMatrix]] = [
            [of for unit in units[at : at + len(slots)] for of in unit]
            for at in range(0, len(units), len(slots) or 1)
        ]
        self._places: dict[Stored, StreamedSlice] = {}
        self.nbytes = sum(layouts[of].nbytes for unit in units for of in unit)
        with ExitStack() as owners:
            for number, unit in enumerate(units):
                slot = slots[number % len(slots)]
                offset = slot.offset
                for of in unit:
                    nbytes, name = layouts[of].nbytes, of.name
                    source = owners.enter_context(device.pinned(nbytes, name))
                    self._places[of] = StreamedSlice(slot.buffer, offset, nbytes, name, source)
                    offset += _aligned(nbytes)
            self._owners = owners.pop_all()

    def clear(self) -> None:
        """Fill the slots with zeros, as the padding of matrices is."""
        for slot in self._slots:
            slot.fill(0)

    def save(self, matrices: Sequence[Stored]) -> None:
        """Copy matrices from their slots to host memory."""
        with self._device.create_stream("weights to the host") as stream:
            for of in matrices:
                place = self._places[of]
                place.download_async(place.source, place.nbytes, 0, stream)
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


def check_host(nbytes: int) -> None:
    """Raise ModelError where the host has too little memory for ``nbytes`` of weights."""
    available = host_available() if nbytes else None
    if available is not None and nbytes + _SPARE_BYTES > available:
        raise ModelError(
            f"not enough host memory: {nbytes:,} bytes of weights would be streamed from it, "
            f"{max(0, available - _SPARE_BYTES):,} are available: leave more on the GPU"
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
