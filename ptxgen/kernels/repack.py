"""Repacking at load: GGUF blocks to the tiles that all other kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout, recoded

CTA_THREADS = 128


@dataclass(frozen=True)
class Repack(KernelSpec):
    """Repack ``rows`` rows of a GGUF tensor of ``cols`` columns, a chunk of ``Layout.chunks``,
    after `recoded`."""

    format: Format
    rows: int
    cols: int

    name = "repack"

    def __post_init__(self) -> None:
        Layout(self.format, self.rows, self.cols)

    @property
    def layout(self) -> Layout:
        """The layout of the chunk's tiles."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def source_nbytes(self) -> int:
        """Bytes of the chunk."""
        return self.layout.source_nbytes

    @property
    def source_units(self) -> int:
        """Units of the chunk, without padding."""
        return self.rows * self.layout.row_units

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("source", "u8", ("source_nbytes",), Access.IN),
            # INOUT: the padding was zeroed before, and is preserved
            Param("tiles", "u8", (self.layout.tiles_nbytes,), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.source_units, CTA_THREADS), 1, 1), block=(CTA_THREADS, 1, 1)
        )

    def bytes_moved(self) -> int:
        return self.source_nbytes + self.layout.tiles_nbytes

    def reference(self, **inputs: Any) -> dict[str, Array]:
        packed = self.layout.pack_recoded(inputs["source"])
        return {"tiles": packed[: self.layout.tiles_nbytes]}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        count = self.source_nbytes // self.format.nbytes
        blocks = recoded(self.format, random_blocks(self.format, count, rng))
        return {"source": blocks, "tiles": np.zeros(self.layout.tiles_nbytes, np.uint8)}

    @classmethod
    def examples(cls) -> dict[str, Repack]:
        floats = [f for f in FORMATS.values() if f.is_float]
        return {
            **{f.name: cls(f, 3, 37 if f.nbytes == 2 else 64) for f in floats},
            **{f.name: cls(f, 19, 3 * f.block) for f in FORMATS.values() if not f.is_float},
            "F32 long": cls(FORMATS["F32"], 3, 33 * 32 + 1 + 9 * 32),
            "Q8_0 whole tiles": cls(FORMATS["Q8_0"], 16, 352),
        }
