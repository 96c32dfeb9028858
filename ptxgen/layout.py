"""How a matrix of a GGUF type lies on the device: planes made for wide loads.

A matrix (rows, cols) is cut into units of 32 consecutive weights of a row. Each plane of the
format holds one item (quants, scales, factors) for every unit or every few units, row-major, and
starts 256-byte aligned; together they take as many bytes as the GGUF blocks. Rows of unquantised
types are padded with zeros to whole units.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import UNIT, Bytes, Format, Plane
from urdir.ptxgen.spec import ceil_div

ALIGNMENT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Units ``first`` to ``first + units`` of a matrix, and their bytes in the GGUF tensor."""

    first: int
    units: int
    source_offset: int
    source_nbytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A repacked matrix of ``rows`` x ``cols`` weights; see the module's text.

    Raises PtxgenError when ``cols`` is no multiple of the format's block.
    """

    format: Format
    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1 or self.cols % self.format.block:
            raise PtxgenError(
                f"a {self.format.name} matrix of {self.rows} x {self.cols}: both must be positive, "
                f"columns a multiple of {self.format.block}"
            )

    @property
    def row_units(self) -> int:
        """Units of a row."""
        return ceil_div(self.cols, UNIT)

    @property
    def units(self) -> int:
        """Units of the matrix."""
        return self.rows * self.row_units

    @property
    def source_nbytes(self) -> int:
        """Bytes of the GGUF tensor."""
        return self.rows * self.cols // self.format.block * self.format.nbytes

    def plane_nbytes(self, plane: Plane) -> int:
        """Bytes of a plane, without the padding to the next one."""
        return self.units // plane.units * plane.nbytes

    def row_nbytes(self, plane: Plane) -> int:
        """Bytes from an item of a plane to the one below it, in the next row."""
        return self.row_units // plane.units * plane.nbytes

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Plane name -> its first byte in the repacked matrix."""
        offsets, at = {}, 0
        for plane in self.format.planes:
            offsets[plane.name] = at
            at += ceil_div(self.plane_nbytes(plane), ALIGNMENT) * ALIGNMENT
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of the repacked matrix, in whole words."""
        last = self.format.planes[-1]
        return ceil_div(self.offsets[last.name] + self.plane_nbytes(last), 4) * 4

    def chunks(self, max_units: int) -> Iterator[Chunk]:
        """The matrix in pieces of at most ``max_units`` units, in order.

        Quantised types: whole blocks, in multiples of 16 (so that every plane's piece starts
        16-byte aligned). Unquantised types: whole rows. A piece is never smaller than that.
        """
        fmt = self.format
        step = self.row_units if fmt.is_float else 16 * fmt.block_units
        step *= max(1, max_units // step)
        for first in range(0, self.units, step):
            units = min(step, self.units - first)
            yield Chunk(first, units, self._source_at(first), self._source_at(units))

    def _source_at(self, unit: int) -> int:
        """The GGUF byte where a unit's block (quantised) or row (unquantised) begins."""
        if self.format.is_float:
            return unit // self.row_units * self.cols * self.format.nbytes
        return unit // self.format.block_units * self.format.nbytes

    # ---- numpy ----

    def pack(self, source: npt.NDArray[Any]) -> Bytes:
        """GGUF bytes of the tensor (any shape, contiguous) -> the repacked matrix, (nbytes,) u8."""
        raw = np.ascontiguousarray(source).view(np.uint8).reshape(-1)
        if raw.size != self.source_nbytes:
            raise PtxgenError(
                f"{self.format.name} {self.rows} x {self.cols} takes {self.source_nbytes} bytes, "
                f"got {raw.size}"
            )
        packed = np.zeros(self.nbytes, np.uint8)
        if self.format.is_float:
            padded = packed.reshape(self.rows, -1)
            padded[:, : self.cols * self.format.nbytes] = raw.reshape(self.rows, -1)
            return packed
        for plane in self.format.planes:
            self.plane_of(packed, plane)[:] = pack_plane(self.format, plane, raw)
        return packed

    def plane_of(self, packed: Bytes, plane: Plane) -> Bytes:
        """A view of one plane, (items, bytes of an item) u8."""
        at = self.offsets[plane.name]
        return packed[at : at + self.plane_nbytes(plane)].reshape(-1, plane.nbytes)

    def unpack(self, packed: Bytes) -> npt.NDArray[np.float32]:
        """The weights (rows, cols) f32 of a repacked matrix, as GGUF defines them, to the bit."""
        if self.format.is_float:
            return self._floats(packed)
        groups = self.format.unit_groups
        factor = self._factors(packed, "d")
        if self.format.has("scale"):
            scale = self._numbers(packed, "scale", groups).astype(np.float32)
            factor = factor * (scale - np.float32(self.format.scale_offset))
        q = self._numbers(packed, "q", UNIT).astype(np.float32) - np.float32(self.format.offset)
        values = factor[:, :, None] * q.reshape(self.units, groups, -1)
        if self.format.has_minimums:
            minimum = self._factors(packed, "m")
            if self.format.has("minimum"):
                minimum = minimum * self._numbers(packed, "minimum", groups).astype(np.float32)
            values += np.float32(self.format.min_sign) * minimum[:, :, None]
        return values.reshape(self.rows, self.cols)

    def _floats(self, packed: Bytes) -> npt.NDArray[np.float32]:
        if self.format.element == "bf16":
            values = (packed.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            dtype = np.float16 if self.format.element == "f16" else np.float32
            values = packed.view(dtype).astype(np.float32)
        return values.reshape(self.rows, -1)[:, : self.cols]

    def _factors(self, packed: Bytes, number: str) -> npt.NDArray[np.float32]:
        """The f16 number of each unit's block, (units, 1) f32."""
        plane, part = next(self.format.parts(number))
        halves = np.ascontiguousarray(self.plane_of(packed, plane)).view(np.float16)
        column = halves[:, part.target.start // 16].astype(np.float32)
        return np.repeat(column, plane.units)[:, None]

    def _numbers(self, packed: Bytes, number: str, per_unit: int) -> npt.NDArray[np.uint8]:
        """An integer number of every unit, (units, per_unit) u8."""
        numbers = np.zeros((self.units, per_unit), np.uint8)
        for plane, part in self.format.parts(number):
            items = self.plane_of(packed, plane)
            by_item = numbers.reshape(len(items), part.count)
            for index in range(part.count):
                byte, shift = divmod(part.target.position(index), 8)
                field = (items[:, byte] >> shift) & part.target.mask
                by_item[:, index] |= field << part.shift
        return numbers


def pack_plane(fmt: Format, plane: Plane, blocks: Bytes) -> Bytes:
    """One plane of a run of GGUF blocks (bytes, any shape) -> (items, bytes of an item) u8."""
    blocks = blocks.reshape(-1, fmt.nbytes)
    block_items = fmt.block_units // plane.units
    items = np.zeros((len(blocks), block_items, plane.nbytes), np.uint8)
    for part in plane.parts:
        flip = np.uint8(1 << (part.source.width - 1) if part.source.signed else 0)
        for item in range(block_items):
            for index in range(part.count):
                at, from_shift = divmod(part.source.position(item * part.count + index), 8)
                byte, to_shift = divmod(part.target.position(index), 8)
                field = ((blocks[:, at] >> from_shift) & part.source.mask) ^ flip
                items[:, item, byte] |= field << to_shift
    return items.reshape(-1, plane.nbytes)
