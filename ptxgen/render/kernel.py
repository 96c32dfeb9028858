"""Interface of a kernel for rendering: small protocols that `urdir.ptxgen.spec` satisfies."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from urdir.ptxgen.target import Target

Dim3 = tuple[int, int, int]


class Param(Protocol):
    """One kernel parameter: an address in global memory, or a scalar passed by value."""

    @property
    def name(self) -> str:
        """Its name in the parameter list, and of the register that it is loaded into."""

    @property
    def dtype(self) -> str:
        """PTX element type: "f32", "u8", ..."""

    @property
    def shape(self) -> tuple[str | int, ...]:
        """Shape of the array in memory: numbers, or names of attributes of the spec."""

    @property
    def access(self) -> Enum | None:
        """How the memory is used, ``.value`` is "in", "out" or "inout"; None for a scalar."""

    @property
    def is_pointer(self) -> bool:
        """True for an address, False for a scalar."""


class LaunchShape(Protocol):
    """The extent of a launch, as far as PTX depends on it."""

    @property
    def grid(self) -> Dim3:
        """CTAs along x, y, z."""

    @property
    def block(self) -> Dim3:
        """Threads of a CTA along x, y, z."""

    @property
    def cluster(self) -> Dim3:
        """CTAs of a cluster along x, y, z; (1, 1, 1) for none."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA in bytes."""

    @property
    def resident(self) -> int:
        """Minimum resident CTAs per SM by registers; 0 leaves that to the assembler."""


class Kernel(Protocol):
    """A specialised kernel: its template, and the contents of the frame."""

    @property
    def name(self) -> str:
        """The PTX entry name."""

    @property
    def template(self) -> tuple[str, str]:
        """The template: (package, file)."""

    @property
    def params(self) -> Sequence[Param]:
        """The parameter list in PTX order."""

    @property
    def launch_shape(self) -> LaunchShape:
        """Grid, block, cluster and dynamic shared memory of every launch."""

    @property
    def waits_for_dependencies(self) -> bool:
        """Whether it runs ``griddepcontrol.wait`` on targets that have it."""

    def resident_on(self, target: Target) -> int:
        """Minimum resident CTAs per SM by registers; 0 leaves that to the assembler."""

    @property
    def launch_fields(self) -> frozenset[str]:
        """Fields that affect only the grid: launches of one text may differ in them."""

    def text_fields(self) -> dict[str, Any]:
        """Other fields by name, the text's specialisation; visible to the template."""
