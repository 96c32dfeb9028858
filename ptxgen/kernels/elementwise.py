"""What the kernels that map arrays element by element have in common."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import KernelSpec, LaunchShape, ceil_div


@dataclass(frozen=True)
class Elementwise(KernelSpec):
    """A map over ``n`` elements: groups of four, one a thread, CTAs of at most 128 threads.

    Small CTAs spread a few thousand elements over many SMs.
    """

    n: int

    limits = limited(n=POSITIVE)

    @property
    def launch_shape(self) -> LaunchShape:
        groups = ceil_div(self.n, 4)
        threads = min(128, 32 * ceil_div(groups, 32))
        return LaunchShape(grid=(ceil_div(groups, threads), 1, 1), block=(threads, 1, 1))
