"""Work of the host between the launches of a plan: what is only known, or there, when they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from urdir.driver.errors import DriverError

if TYPE_CHECKING:
    from urdir.driver.kernel import Dim3
    from urdir.driver.memory import Region
    from urdir.driver.pinned import PinnedBuffer
    from urdir.driver.stream import Stream


class Access(Enum):
    """Access of work to its memory."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True, slots=True)
class HostParam:
    """Memory that work reads or writes, ``nbytes`` of it."""

    name: str
    nbytes: int
    access: Access
    dtype: ClassVar[str] = "u8"
    is_pointer: ClassVar[bool] = True
    numpy_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The extent of something that is not launched on the device."""

    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    cluster: Dim3 = (1, 1, 1)
    shared_bytes: int = 0
    cooperative: bool = False
    prefers_shared: bool = False


@dataclass(frozen=True, slots=True)
class _Exact:
    rtol: float = 0.0
    atol: float = 0.0


class HostWork:
    """Base of work of the host, which takes the place of a `Kernel` in a plan.

    Subclasses have ``name`` and ``params``, and `perform` the work. A plan with such work is
    recorded as several graphs, between which it is done.
    """

    name: str
    waits_for_dependencies = False
    launch_shape = _Shape()
    tolerance = _Exact()

    @property
    def params(self) -> Sequence[HostParam]:
        """The memory that it uses."""
        raise NotImplementedError

    def perform(self, args: Mapping[str, Region | PinnedBuffer], stream: Stream) -> None:
        """Do the work with ``args``, by name, and queue what writes them on ``stream``, where all
        that comes before is queued. Raises DriverError."""
        raise NotImplementedError

    def key(self, device: str) -> str:
        """Nothing is compiled for it."""
        raise DriverError(f"{self.name} is work of the host, it is not launched on {device}")

    ptx = key

    def shape_of(self, param: HostParam) -> tuple[int, ...]:
        """The bytes of an argument."""
        return (param.nbytes,)

    def nbytes(self, param: HostParam) -> int:
        """The bytes of an argument."""
        return param.nbytes

    def reference(self, **inputs: Any) -> dict[str, Any]:
        """It is the same for every interpreter of a plan."""
        raise DriverError(f"{self.name} is work of the host, it has no reference")

    def bytes_moved(self) -> int:
        """Bytes that are written."""
        return sum(of.nbytes for of in self.params if of.access is not Access.IN)

    def flops(self) -> int:
        """Nothing is computed."""
        return 0
