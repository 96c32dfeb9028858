"""Quantising at load: rows of floats to blocks of E4M3 numbers, by `weights.quantise`."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.kernels.quantise_kernel import SOURCES, QuantiseKernel
from urdir.ptxgen.spec import Access, LaunchShape, Param
from urdir.ptxgen.weights.e4m3 import MOST
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class QuantiseRows(QuantiseKernel):
    """Blocks of E4M3 numbers with one scale a row (`QuantiseKernel`): a CTA has one."""

    name = "quantise_rows"
    types = ("E4M3R256", "E4M3G128", "E4M3G32")
    launch_fields = frozenset({"rows"})
    cta_threads = 256
    most = MOST

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row's blocks."""
        return self.cols // self.format.block * self.format.nbytes

    @property
    def params(self) -> tuple[Param, ...]:
        count = self.rows * self.cols
        return (
            Param("source", "u8", (count * self.source.nbytes,), Access.IN),
            Param("y", "u8", (self.rows * self.row_nbytes,), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(self.cta_threads, 1, 1))

    @classmethod
    def examples(cls) -> dict[str, QuantiseRows]:
        whole = {
            f"{name} of {source}": cls(FORMATS[name], FORMATS[source], 3, 3 * FORMATS[name].block)
            for name in cls.types
            for source in SOURCES
        }
        return {**whole, "long rows": cls(FORMATS["E4M3G32"], FORMATS["BF16"], 2, 2080)}

    def flops(self) -> int:
        return 8 * self.rows * self.cols
