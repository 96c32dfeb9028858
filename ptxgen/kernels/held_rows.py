"""Base of kernels whose CTAs hold one row each in registers."""

from __future__ import annotations

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import KernelSpec, LaunchShape, ceil_div

#: Maximum warps per CTA, and vectors of four values per thread.
MAX_WARPS, MAX_VECTORS = 16, 8


class HeldRows(KernelSpec):
    """Base class: f32 ``rows`` of ``cols`` values, which are fields of the subclass. Raises
    PtxgenError for columns that are not whole vectors, or exceed the registers."""

    rows: int
    cols: int

    def __post_init__(self) -> None:
        super().__post_init__()
        most = 4 * 32 * MAX_WARPS * MAX_VECTORS
        if self.cols < 4 or self.cols % 4 or self.cols > most:
            raise PtxgenError(
                f"{self.name}: rows of {self.cols} values: multiples of 4 up to {most}"
            )

    @property
    def warps(self) -> int:
        """Warps per CTA: one vector per thread, up to the maximum."""
        return min(MAX_WARPS, ceil_div(self.cols, 4 * 32))

    @property
    def vectors(self) -> int:
        """Vectors per thread."""
        return ceil_div(self.cols, 4 * 32 * self.warps)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * self.warps, 1, 1))
