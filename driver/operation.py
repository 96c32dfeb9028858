"""Operations of a plan as frozen records: launch, copy, fill.

Each is checked when it is created; errors name the operation's label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from urdir.driver.dependencies import Use
from urdir.driver.errors import LaunchError
from urdir.driver.host_work import HostWork
from urdir.driver.kernel import Kernel, signature
from urdir.driver.launch import Argument, PackedArguments, pack
from urdir.driver.memory import Buffer, Region
from urdir.driver.pinned import PinnedBuffer

if TYPE_CHECKING:
    from urdir.driver.stream import Stream

Memory = Region | PinnedBuffer


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: an argument for every parameter of ``kernel``, by name.

    Pointers are Buffers or Slices of at least ``kernel.nbytes(param)`` bytes, scalars numbers.
    Raises LaunchError naming label, kernel and parameter for a missing or unknown argument, a
    number instead of a buffer or vice versa, a null pointer, a closed or too small buffer, and
    outputs that share memory.
    """

    kernel: Kernel
    label: str
    args: Mapping[str, Argument]
    packed: PackedArguments = field(init=False, repr=False, compare=False)
    _uses: tuple[Use, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed, pointers = pack(self.kernel, self.args, self.label), signature(self.kernel).pointers
        object.__setattr__(self, "packed", packed)
        uses = [
            Use(start, start + nbytes, access != "out", access != "in", name)
            for (name, nbytes, access), start in zip(pointers, packed.places, strict=True)
        ]
        object.__setattr__(self, "_uses", tuple(uses))
        written = [use for use in uses if use.writes]
        if len(written) > 1:
            _check_apart(self, written)

    @property
    def what(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def is_on_host(self) -> bool:
        """Whether it is work of the host."""
        return isinstance(self.kernel, HostWork)

    def perform(self, stream: Stream) -> None:
        """Do the host's work, all before it being queued on ``stream``. Raises DriverError."""
        assert isinstance(self.kernel, HostWork)
        self.kernel.perform(self.packed.regions, stream)

    def uses(self) -> tuple[Use, ...]:
        """The bytes of every pointer: the whole declared argument."""
        return self._uses

    def memory(self) -> tuple[Memory, ...]:
        """The memory of each of ``uses()``."""
        return tuple(self.packed.regions.values())

    def bytes_moved(self) -> int:
        """Minimum number of bytes read and written."""
        return self.kernel.bytes_moved()


@dataclass(frozen=True, slots=True)
class Copy:
    """All of ``src``, on the device or page-locked on the host, to the start of ``dst``.

    Raises LaunchError if ``dst`` is smaller or the two overlap.
    """

    dst: Region
    src: Memory
    label: str

    #: The kind of operation.
    what = "copy"

    def __post_init__(self) -> None:
        src, dst = self.uses()
        if self.dst.nbytes < self.src.nbytes:
            raise LaunchError(
                f"{self.label}: {self.src.name!r} has {self.src.nbytes:,} bytes, too many to copy "
                f"to {self.dst.name!r}, which has {self.dst.nbytes:,}: copy a slice"
            )
        if _overlap(src, dst):
            raise LaunchError(
                f"{self.label}: {self.src.name!r} overlaps {self.dst.name!r}, where it is copied to"
            )

    def uses(self) -> tuple[Use, ...]:
        """Source read, as many bytes of the destination written."""
        nbytes = self.src.nbytes
        return (_use(self.src, nbytes, "in", "src"), _use(self.dst, nbytes, "out", "dst"))

    def memory(self) -> tuple[Memory, ...]:
        """The memory of each of ``uses()``."""
        return (self.src, self.dst)

    def bytes_moved(self) -> int:
        """Bytes of the device that are read and written."""
        return self.src.nbytes * (1 if isinstance(self.src, PinnedBuffer) else 2)


@dataclass(frozen=True, slots=True)
class Fill:
    """Every byte of ``dst`` set to ``byte``. Raises LaunchError unless that is 0 to 255."""

    dst: Region
    byte: int
    label: str

    #: The kind of operation.
    what = "fill"

    def __post_init__(self) -> None:
        _ = self.dst.address  # raises LifetimeError for a closed buffer
        if not 0 <= self.byte <= 255:
            raise LaunchError(
                f"{self.label}: {self.dst.name!r} cannot be filled with {self.byte}: 0 to 255"
            )

    def uses(self) -> tuple[Use, ...]:
        """Destination written."""
        return (_use(self.dst, self.dst.nbytes, "out", "dst"),)

    def memory(self) -> tuple[Memory, ...]:
        """The memory of each of ``uses()``."""
        return (self.dst,)

    def bytes_moved(self) -> int:
        """Bytes written."""
        return self.dst.nbytes


Operation = Launch | Copy | Fill


def allocation_of(memory: Memory) -> Buffer | PinnedBuffer:
    """The allocation of a region, which must not be freed before the region's last use."""
    return memory.buffer if isinstance(memory, Region) else memory


def _use(memory: Memory, nbytes: int, access: str, name: str) -> Use:
    start = memory.address
    return Use(start, start + nbytes, access != "out", access != "in", name)


def _overlap(a: Use, b: Use) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _check_apart(launch: Launch, written: Sequence[Use]) -> None:
    for i, a in enumerate(written):
        for b in written[i + 1 :]:
            if _overlap(a, b):
                raise LaunchError(
                    f"{launch.label}: kernel {launch.kernel.name} writes {a.name!r} and "
                    f"{b.name!r}, which share memory here: give each its own buffer or slice"
                )
