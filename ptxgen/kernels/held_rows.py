"""What kernels have in common whose CTAs have a row each, in the registers of their threads."""

from __future__ import annotations

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import KernelSpec, LaunchShape, ceil_div

#: Most warps of a CTA, and most vectors of four values that a thread has of a row.
MAX_WARPS, MAX_VECTORS = 16, 8


class HeldRows(KernelSpec):
    """Base: f32 ``rows`` of ``cols`` values, which are fields of the subclass. Raises PtxgenError
    for columns that are no whole vectors, or more than registers have room for."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        most = 4 * 32 * MAX_WARPS * MAX_VECTORS
        if self.cols < 4 or self.cols % 4 or self.cols > most:
            raise PtxgenError(
                f"{self.name}: rows of {self.cols} values: multiples of 4 up to {most}"
            )

    @property
    def warps(self) -> int:
        """Warps of a CTA: a vector a thread, until there are enough."""
        return min(MAX_WARPS, ceil_div(self.cols, 4 * 32))

    @property
    def vectors(self) -> int:
        """Vectors of a thread."""
        return ceil_div(self.cols, 4 * 32 * self.warps)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))
