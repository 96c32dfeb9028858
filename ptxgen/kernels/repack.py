"""Repacking at load: GGUF blocks into the planes that every other kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format, random_blocks
from urdir.ptxgen.layout import Chunk, Layout, pack_plane
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

CTA_THREADS = 128


@dataclass(frozen=True)
class Repack(KernelSpec):
    """Repack ``units`` units (32 weights each) of a GGUF tensor, a chunk of ``Layout.chunks``.

    Whole blocks of a quantised type, ``cols`` 0; whole rows of ``cols`` columns of an unquantised
    one, each padded with zeros to whole units.
    """

    format: Format
    units: int
    cols: int = 0

    name = "repack"
    template = ("urdir.templates", "repack.ptx.j2")

    def __post_init__(self) -> None:
        fmt = self.format
        if fmt.is_float != (self.cols > 0):
            raise PtxgenError(f"repack of {fmt.name}: cols is {self.cols}")
        whole = self.row_units if fmt.is_float else fmt.block_units
        if self.units < 1 or self.units % whole:
            raise PtxgenError(f"repack of {fmt.name}: {self.units} units, no multiple of {whole}")

    @classmethod
    def of(cls, layout: Layout, chunk: Chunk) -> Repack:
        """The spec that repacks one chunk of a matrix."""
        return cls(layout.format, chunk.units, layout.cols if layout.format.is_float else 0)

    def regions(self, layout: Layout, chunk: Chunk) -> dict[str, tuple[int, int]]:
        """Parameter name -> (offset, nbytes).

        ``source`` in a staging buffer that holds the chunk's bytes from its start on; each plane
        in the repacked matrix.
        """
        regions = {"source": (0, chunk.source_nbytes)}
        for plane in self.format.planes:
            offset = layout.offsets[plane.name] + chunk.first // plane.units * plane.nbytes
            regions[plane.name] = (offset, self.units // plane.units * plane.nbytes)
        return regions

    @property
    def row_units(self) -> int:
        """Units of a row of an unquantised type."""
        return ceil_div(self.cols, UNIT)

    @property
    def source_nbytes(self) -> int:
        """Bytes of the chunk in GGUF."""
        if self.format.is_float:
            return self.units // self.row_units * self.cols * self.format.nbytes
        return self.units // self.format.block_units * self.format.nbytes

    @property
    def params(self) -> tuple[Param, ...]:
        planes = (
            Param(p.name, "u8", (self.units // p.units, p.nbytes), Access.OUT)
            for p in self.format.planes
        )
        return (Param("source", "u8", ("source_nbytes",), Access.IN), *planes)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.units, CTA_THREADS), 1, 1), block=(CTA_THREADS, 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        fmt, source = self.format, inputs["source"]
        if fmt.is_float:
            layout = Layout(fmt, self.units // self.row_units, self.cols)
            return {fmt.planes[0].name: layout.pack(source).reshape(self.units, -1)}
        return {plane.name: pack_plane(fmt, plane, source) for plane in fmt.planes}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        blocks = random_blocks(self.format, self.source_nbytes // self.format.nbytes, rng)
        return {"source": blocks.reshape(-1)}

    @classmethod
    def examples(cls) -> Sequence[Repack]:
        return (
            *(cls(f, 6, 37 if f.nbytes == 2 else 64) for f in FORMATS.values() if f.is_float),
            *(cls(f, 19 * f.block_units) for f in FORMATS.values() if not f.is_float),
            cls(FORMATS["F32"], 129, 33 * 32 + 1 + 9 * 32),
        )

    def flops(self) -> int:
        return 0
