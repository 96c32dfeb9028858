"""How the threads of a CTA share a row of f32 values: for kernels with a CTA for each row."""

from __future__ import annotations

from urdir.ptxgen.spec import ceil_div


class RowThreads:
    """Threads for rows of ``cols`` values; a base of kernel specs."""

    cols: int

    @property
    def vector(self) -> int:
        """Columns per access: four if every row stays 16-byte aligned."""
        return 4 if self.cols % 4 == 0 else 1

    @property
    def warps(self) -> int:
        """Warps per CTA: about eight values per thread, at most 1024 threads."""
        return min(32, ceil_div(self.cols, 32 * 8))

    @property
    def steps(self) -> int:
        """Accesses with which a thread covers its part of a row."""
        return ceil_div(self.cols, self.vector * 32 * self.warps)
