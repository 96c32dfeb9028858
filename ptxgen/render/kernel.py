"""Interface of a kernel for rendering: a small protocol that `urdir.ptxgen.spec` satisfies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.launch import LaunchShape, Param
from urdir.ptxgen.target import Target


class Kernel(Protocol):
    """A specialised kernel, a dataclass: its template, and the contents of the frame."""

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


def field_values(kernel: Kernel) -> dict[str, Any]:
    """The specialisation, a kernel's fields: name -> value, in declaration order.

    Raises PtxgenError for a class that is no frozen dataclass: its specs would be no keys."""
    made = getattr(type(kernel), "__dataclass_params__", None)
    if made is None or not made.frozen:
        kind = type(kernel).__name__
        raise PtxgenError(f"kernel {kernel.name}: {kind} needs @dataclass(frozen=True)")
    return {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}  # type: ignore[arg-type]


def text_fields(kernel: Kernel) -> dict[str, Any]:
    """The fields that the text depends on, all except ``launch_fields``; templates see them."""
    launch = kernel.launch_fields
    return {name: value for name, value in field_values(kernel).items() if name not in launch}
