"""Interface of a kernel for rendering: a small protocol that `urdir.ptxgen.spec` satisfies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from urdir.ptxgen.ptx.launch import LaunchShape, Param
from urdir.ptxgen.target import Target


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
