"""How threads share rows of f32 values."""

from __future__ import annotations

from urdir.ptxgen.spec import LaunchShape, ceil_div


class RowAccesses:
    """How a row of ``cols`` values is read and written."""

    cols: int

    @property
    def vector(self) -> int:
        """Values per access: four if every row stays 16-byte aligned."""
        return 4 if self.cols % 4 == 0 else 1


class RowThreads(RowAccesses):
    """Threads of a CTA for each row; a base of kernel specs."""

    @property
    def warps(self) -> int:
        """Warps per CTA: about eight values per thread, at most 1024 threads."""
        return min(32, ceil_div(self.cols, 32 * 8))

    @property
    def steps(self) -> int:
        """Accesses with which a thread covers its part of a row."""
        return ceil_div(self.cols, self.vector * 32 * self.warps)


class VectorThreads(RowAccesses):
    """A thread for each access of each of ``rows`` rows; a base of kernel specs."""

    rows: int

    @property
    def launch_shape(self) -> LaunchShape:
        """CTAs of up to 128 threads of a row."""
        vectors = self.cols // self.vector
        threads = min(128, 32 * ceil_div(vectors, 32))
        return LaunchShape(grid=(ceil_div(vectors, threads), self.rows, 1), block=(threads, 1, 1))
