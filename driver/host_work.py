"""Work of the host between the launches of a plan: what is only known, or there, when they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from urdir.driver.errors import DriverError
from urdir.driver.kernel import EXACT
from urdir.ptxgen.ptx.launch import Access, LaunchShape, Param

if TYPE_CHECKING:
    from urdir.driver.memory import Region
    from urdir.driver.pinned import PinnedBuffer
    from urdir.driver.stream import Stream


class HostWork:
    """Base of work of the host, which takes the place of a `Kernel` in a plan.

    Subclasses have ``name`` and ``params``, and `perform` the work. A plan with such work is
    recorded as several graphs, between which it is done.
    """

    name: str
    waits_for_dependencies = False
    launch_shape = LaunchShape((1, 1, 1), (1, 1, 1))
    tolerance = EXACT

    @property
    def params(self) -> Sequence[Param]:
        """The memory that it uses, as bytes ("u8")."""
        raise NotImplementedError

    def perform(self, args: Mapping[str, Region | PinnedBuffer], stream: Stream) -> None:
        """Do the work with ``args``, by name, and queue what writes them on ``stream``, where all
        that comes before is queued. Raises DriverError."""
        raise NotImplementedError

    def key(self, device: str) -> str:
        """Nothing is compiled for it."""
        raise DriverError(f"{self.name} is work of the host, it is not launched on {device}")

    ptx = key

    def shape_of(self, param: Param) -> tuple[int, ...]:
        """The bytes of an argument."""
        return (self.nbytes(param),)

    def nbytes(self, param: Param) -> int:
        """The bytes of an argument."""
        return int(param.shape[0])

    def reference(self, **inputs: Any) -> dict[str, Any]:
        """It is the same for every interpreter of a plan."""
        raise DriverError(f"{self.name} is work of the host, it has no reference")

    def bytes_moved(self) -> int:
        """Bytes that are written."""
        return sum(self.nbytes(of) for of in self.params if of.access is not Access.IN)

    def flops(self) -> int:
        """Nothing is computed."""
        return 0
