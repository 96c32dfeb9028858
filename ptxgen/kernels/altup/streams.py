"""Alternating updates of several streams (AltUp, arXiv 2301.13310): what kernels share."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128


@dataclass(frozen=True)
class OfStreams(KernelSpec):
    """Base: ``streams`` (rows, cols) of a layer."""

    rows: int
    cols: int
    streams: int = 4

    limits = limited(rows=GRID_ROWS, cols=POSITIVE, streams=range(2, 9))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.cols, THREADS), self.rows, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6, atol=1e-6)

    def of_streams(self, name: str, access: Access) -> list[Param]:
        """A parameter for each stream."""
        return [Param(f"{name}{i}", "f32", ("rows", "cols"), access) for i in range(self.streams)]

    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.streams
