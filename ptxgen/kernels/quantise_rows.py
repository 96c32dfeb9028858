"""Quantising at load: rows of floats to blocks of E4M3 numbers, by `weights.quantise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.quantise import SOURCES, check, unlike_values
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param
from urdir.ptxgen.weights.e4m3 import MOST
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.quantise import QUANTISERS

TYPES = ("E4M3R256", "E4M3G128", "E4M3G32")


@dataclass(frozen=True)
class QuantiseRows(KernelSpec):
    """Blocks of ``format``, E4M3 numbers with one scale a row, of (rows, cols) values of the type
    ``source``.

    Equal to `QUANTISERS` bit for bit, where values are finite. A CTA has a row.
    """

    format: Format
    source: Format
    rows: int
    cols: int

    name = "quantise_rows"
    launch_fields = frozenset({"rows"})
    cta_threads = 256
    most = MOST

    def __post_init__(self) -> None:
        check(self.name, self.format, self.source, TYPES)
        _ = Layout(self.format, self.rows, self.cols)

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

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values = Layout(self.source, self.rows, self.cols)
        rows = values.unpack(values.pack(inputs["source"]))
        return {"y": QUANTISERS[self.format.name](rows).reshape(-1)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return {"source": unlike_values(self.rows * self.cols, self.source, rng)}

    @classmethod
    def examples(cls) -> dict[str, QuantiseRows]:
        whole = {
            f"{name} of {source}": cls(FORMATS[name], FORMATS[source], 3, 3 * FORMATS[name].block)
            for name in TYPES
            for source in SOURCES
        }
        return {**whole, "long rows": cls(FORMATS["E4M3G32"], FORMATS["BF16"], 2, 2080)}

    def flops(self) -> int:
        return 8 * self.rows * self.cols
