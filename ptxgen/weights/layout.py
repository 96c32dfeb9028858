"""Layout of a GGUF-typed matrix on the device: tiles, each one run of bytes.

A matrix (rows, cols) is cut into units of 32 consecutive weights of a row. A tile is 16 rows x 8
units; the tiles of 16 rows (a band) are contiguous. Each plane of the format holds one item
(quants, scales, factors) for every unit or every few units. In a tile the planes are contiguous, in
a plane the rows. Together the planes take as many bytes as the GGUF blocks, except for IQ1_M
and IQ4_XS. The last tiles are padded with zeros.

A tile is one run because a copy by the engine that moves tiles to shared memory costs about 69
cycles of an SM whatever its size (H200). Runs are multiples of 32 bytes; a matrix starts 256-byte
aligned.

For most types the tiles are followed by a power of two for each row, f32, for products in f16: see
`Layout.row_powers`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.e4m3 import e4m3
from urdir.ptxgen.weights.fields import Part, Plane
from urdir.ptxgen.weights.formats import UNIT, Bytes, Format, random_blocks
from urdir.ptxgen.weights.grids import parts, recode, running_signs, signs_of

#: Rows of a tile, and units of one of its rows.
TILE_ROWS, TILE_UNITS = 16, 8
#: Columns of a tile.
TILE_COLS = TILE_UNITS * UNIT


@dataclasses.dataclass(frozen=True)
class Layout:
    """A repacked matrix of ``rows`` x ``cols`` weights; see the module's docstring.

    Raises PtxgenError if ``cols`` is not a multiple of the format's block.
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
        """Units per row."""
        return ceil_div(self.cols, UNIT)

    @property
    def is_ragged(self) -> bool:
        """Whether the last tile of a row has units beyond it."""
        return self.row_units % TILE_UNITS > 0

    @property
    def bands(self) -> int:
        """Number of bands, i.e. tiles in a column."""
        return ceil_div(self.rows, TILE_ROWS)

    @property
    def row_tiles(self) -> int:
        """Tiles per band."""
        return ceil_div(self.row_units, TILE_UNITS)

    def place(self, row: int, unit: int) -> int:
        """The number of unit ``unit`` of row ``row``, counted tile by tile."""
        band, row = divmod(row, TILE_ROWS)
        tile, unit = divmod(unit, TILE_UNITS)
        return ((band * self.row_tiles + tile) * TILE_ROWS + row) * TILE_UNITS + unit

    @property
    def source_nbytes(self) -> int:
        """Bytes of the GGUF tensor."""
        return self.rows * self.source_row_nbytes

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Plane name -> its first byte in a tile."""
        sizes = [plane_run(plane) for plane in self.format.tile_planes]
        return {p.name: sum(sizes[:i]) for i, p in enumerate(self.format.tile_planes)}

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a tile."""
        return sum(plane_run(plane) for plane in self.format.tile_planes)

    @property
    def band_nbytes(self) -> int:
        """Bytes of a band."""
        return self.row_tiles * self.tile_nbytes

    @property
    def tiles_nbytes(self) -> int:
        """Bytes of all tiles, after which the row powers start."""
        return self.bands * self.band_nbytes

    @property
    def powers_nbytes(self) -> int:
        """Bytes of the row powers, those of padded rows included."""
        return 4 * self.bands * TILE_ROWS if self.format.has_powers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the repacked matrix."""
        return self.tiles_nbytes + self.powers_nbytes

    def span(self, first_row: int, rows: int) -> tuple[int, int]:
        """(offset, nbytes) of the tiles of some rows, from a band's first one on."""
        bands = ceil_div(rows, TILE_ROWS)
        return first_row // TILE_ROWS * self.band_nbytes, bands * self.band_nbytes

    def chunks(self, max_nbytes: int) -> Iterator[tuple[int, int]]:
        """Split the matrix into whole bands: (first row, rows) of pieces of at most ``max_nbytes``,
        in GGUF and repacked. A piece is at least one band.
        """
        step = TILE_ROWS * max(1, max_nbytes // (TILE_ROWS * self.source_row_nbytes))
        for first in range(0, self.rows, step):
            yield first, min(step, self.rows - first)

    @property
    def source_row_nbytes(self) -> int:
        """Bytes of a row of the GGUF tensor."""
        return self.cols // self.format.block * self.format.nbytes

    # ---- numpy ----

    def pack(self, source: npt.NDArray[Any]) -> Bytes:
        """GGUF bytes of the tensor (any shape, contiguous) -> the repacked matrix, (nbytes,) u8.
        Raises PtxgenError for another number of bytes."""
        raw = np.ascontiguousarray(source).view(np.uint8).reshape(-1)
        if raw.size != self.source_nbytes:
            raise PtxgenError(
                f"{self.format.name} {self.rows} x {self.cols} takes {self.source_nbytes} bytes, "
                f"got {raw.size}"
            )
        return self.pack_recoded(recoded(self.format, raw))

    def pack_recoded(self, raw: Bytes) -> Bytes:
        """Blocks after `recoded`, (bytes,) u8 -> the repacked matrix, (nbytes,) u8."""
        packed = np.zeros(self.nbytes, np.uint8)
        for plane in self.format.tile_planes:
            items = (
                self._units_of(raw) if self.format.is_float else pack_plane(self.format, plane, raw)
            )
            self._tiles_of(packed, plane)[:] = self._padded(items)
        if self.format.has_powers:
            self.powers_of(packed)[:] = self.row_powers(packed)
        return packed

    def _units_of(self, raw: Bytes) -> Bytes:
        """Values of an unquantised type as units, (units, bytes) u8, rows padded with zeros."""
        rows = raw.reshape(self.rows, -1)
        pad = self.row_units * UNIT * self.format.nbytes - rows.shape[1]
        return np.pad(rows, ((0, 0), (0, pad))).reshape(-1, UNIT * self.format.nbytes)

    def plane_of(self, packed: Bytes, plane: Plane) -> Bytes:
        """A view of one plane, (tiles, items of a tile, bytes of an item) u8."""
        tiles = packed[: self.tiles_nbytes].reshape(-1, self.tile_nbytes)
        at = self.offsets[plane.name]
        run = tiles[:, at : at + plane_run(plane)]
        return run.reshape(len(tiles), -1, plane.nbytes)

    def powers_of(self, packed: Bytes) -> npt.NDArray[np.float32]:
        """A view of the row powers, (bands * 16,) f32; empty if the type has none."""
        return packed[self.tiles_nbytes :].view(np.float32)

    def row_powers(self, packed: Bytes) -> npt.NDArray[np.float32]:
        """The power of two of each row, (bands * 16,) f32, from the tiles of a repacked matrix.

        ``bound * P`` lies between 2^14 and 2^15 (exclusive), so that f16 can hold the factors of
        quants. ``bound`` is the largest |d| of the row times the largest |scale - scale_offset|
        that the scale's bits can express, or the largest |m| times the largest minimum, if that is
        larger (times 1 for types without them; without `halvings` and quants); for unquantised
        types the largest |weight|. P has a normal number's exponent. It is 1 for rows whose bound
        is 0, infinite or NaN, and for padding.
        """
        bound = self._bounds(packed)
        counts = (bound > 0) & np.isfinite(bound)
        exponents = np.clip(15 - np.frexp(bound)[1], -126, 127)
        powers = np.ones(self.bands * TILE_ROWS, np.float32)
        powers[: self.rows][counts] = np.ldexp(np.float32(1), exponents[counts])
        return powers

    def _bounds(self, packed: Bytes) -> npt.NDArray[np.float32]:
        """The bound of each row, (rows,) f32."""
        if self.format.is_float:
            largest: npt.NDArray[np.float32] = np.abs(self._floats(packed)).max(axis=1)
            return largest
        each: list[npt.NDArray[np.float32]] = [
            np.abs(self.factors(packed, number, bound=True)).reshape(self.rows, -1).max(axis=1)
            * np.float32(times)
            for number, times in self.format.largest_numbers
        ]
        return functools.reduce(np.maximum, each)

    def _tiles_of(self, packed: Bytes, plane: Plane) -> Bytes:
        """A plane as (bands, rows of a band, tiles, items of a tile's row, bytes) u8."""
        shape = (self.bands, self.row_tiles, TILE_ROWS, TILE_UNITS // plane.units, plane.nbytes)
        return self.plane_of(packed, plane).reshape(shape).swapaxes(1, 2)

    def _padded(self, items: Bytes) -> Bytes:
        """Items in GGUF's order, (items, bytes) u8, padded with zeros, shaped as in `_tiles_of`."""
        by_row = items.reshape(self.rows, -1, items.shape[-1])
        wanted = self.row_tiles * TILE_UNITS * by_row.shape[1] // self.row_units
        rows = self.bands * TILE_ROWS
        pad = ((0, rows - self.rows), (0, wanted - by_row.shape[1]), (0, 0))
        shape = (self.bands, TILE_ROWS, self.row_tiles, -1, items.shape[-1])
        return np.pad(by_row, pad).reshape(shape)

    def _items_of(self, packed: Bytes, plane: Plane) -> Bytes:
        """One plane in GGUF's order, without padding, (items, bytes of an item) u8."""
        by_row = self._tiles_of(packed, plane).reshape(self.bands * TILE_ROWS, -1, plane.nbytes)
        return by_row[: self.rows, : self.row_units // plane.units].reshape(-1, plane.nbytes)

    def unpack(self, packed: Bytes) -> npt.NDArray[np.float32]:
        """The weights (rows, cols) f32 of a repacked matrix, exactly as GGUF defines them."""
        if self.format.is_float:
            return self._floats(packed)
        groups = self.format.unit_groups
        factor = self.factors(packed, "d")
        if self.format.has("scale"):
            scale = self.numbers(packed, "scale", groups).astype(np.float32)
            factor = factor * (scale - np.float32(self.format.scale_offset))
        factor = factor * np.float32(2.0**-self.format.halvings)
        q = self.numbers(packed, "q", UNIT).astype(np.float32) - np.float32(self.format.offset)
        if self.format.element:
            q = (e4m3() * np.float32(2.0**self.format.halvings))[q.astype(np.uint8)]
        elif self.format.table:
            q = np.array(self.format.table, np.float32)[q.astype(np.uint8)]
        values = factor[:, :, None] * q.reshape(len(q), groups, -1)
        if self.format.has_minimums:
            minimum = self.factors(packed, "m")
            if self.format.has("minimum"):
                minimum = minimum * self.numbers(packed, "minimum", groups).astype(np.float32)
            values += np.float32(self.format.min_sign) * minimum[:, :, None]
        return values.reshape(self.rows, self.cols)

    def _floats(self, packed: Bytes) -> npt.NDArray[np.float32]:
        items = np.ascontiguousarray(self._items_of(packed, self.format.planes[0]))
        if self.format.element == "bf16":
            values = (items.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            dtype = np.float16 if self.format.element == "f16" else np.float32
            values = items.view(dtype).astype(np.float32)
        return values.reshape(self.rows, -1)[:, : self.cols]

    def factors(self, packed: Bytes, number: str, bound: bool = False) -> npt.NDArray[np.float32]:
        """The number or the power of two of each unit's block, (units, 1) f32; or those of its
        groups, (units, groups). ``bound``: without E4M3 factors."""
        plane, part = next(self.format.parts(number))
        if self.format.has_exponents:
            return powers_of_two(self._items_of(packed, plane))
        items = np.ascontiguousarray(self._items_of(packed, plane))
        if self.format.has("factor") and not bound:
            singles = items.view(np.float32)
            of_groups = e4m3()[self.numbers(packed, "factor", 2) & 0x7F]
            each: npt.NDArray[np.float32] = np.repeat(singles, plane.units, axis=0) * of_groups
            return each
        if self.format.has_singles:
            return np.repeat(items.view(np.float32), plane.units, axis=0)
        if self.format.has_e4m3_factors:  # the values of NVFP4's table are doubled
            sizes: npt.NDArray[np.float32] = np.float32(0.5) * e4m3()[items & 0x7F]
            return sizes
        halves = items.view(np.float16)
        if self.format.has_group_factors:
            return halves.astype(np.float32)
        column = halves[:, part.target.start // 16].astype(np.float32)
        return np.repeat(column, plane.units)[:, None]

    def numbers(self, packed: Bytes, number: str, per_unit: int) -> npt.NDArray[Any]:
        """An integer number of every unit, (units, per_unit) u8; weights of grids are i8."""
        if (grid := self.format.grid) is None:
            return self._numbers(packed, self.format.parts(number), per_unit)
        if number == "scale":
            steps = parts(self.format.stored, "step")
            return 2 * self._numbers(packed, steps, per_unit) + np.uint8(1)
        index = self._numbers(packed, parts(self.format.stored, "index"), grid.entries, np.uint16)
        if grid.signs == "none":
            rest = parts(self.format.stored, "rest")
            index |= self._numbers(packed, rest, grid.entries, np.uint16) << np.uint16(8)
            minus = np.zeros((len(index), per_unit), np.bool_)
        elif grid.signs == "below":
            below = [*parts(self.format.stored, "below")]
            count = below[0][1].count
            minus = self._numbers(packed, below, count).repeat(per_unit // count, axis=1) != 0
        else:
            signs = next(plane for plane in self.format.stored if plane.name == "signs")
            items = np.ascontiguousarray(self._items_of(packed, signs))
            minus = signs_of(items.view(np.uint32)[:, 0], grid.signs)
        return grid.weights_of(index, minus)

    def _numbers(
        self,
        packed: Bytes,
        parts: Iterable[tuple[Plane, Part]],
        per_unit: int,
        dtype: npt.DTypeLike = np.uint8,
    ) -> npt.NDArray[Any]:
        numbers = np.zeros((self.rows * self.row_units, per_unit), dtype)
        for plane, part in parts:
            items = self._items_of(packed, plane)
            by_item = numbers.reshape(len(items), part.count)
            for index in range(part.count):
                byte, shift = divmod(part.target.position(index), 8)
                field = (items[:, byte] >> shift) & part.target.mask
                by_item[:, index] |= field.astype(dtype) << np.dtype(dtype).type(part.shift)
        return numbers


def recoded(fmt: Format, raw: Bytes) -> Bytes:
    """GGUF blocks (bytes, any shape) as the format's planes describe them, (bytes,) u8."""
    return (recode(raw.reshape(-1, fmt.nbytes)) if fmt.recoded else raw).reshape(-1)


def plane_run(plane: Plane) -> int:
    """Bytes of a plane in a tile."""
    return TILE_ROWS * TILE_UNITS // plane.units * plane.nbytes


def powers_of_two(exponents: Bytes) -> npt.NDArray[np.float32]:
    """2 ** (e - 128): OCP's E8M0, and half of it, since the values of MXFP4's table are doubled."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def pack_plane(fmt: Format, plane: Plane, blocks: Bytes) -> Bytes:
    """One plane of a run of blocks (bytes, any shape, recoded) -> (items, bytes of an item) u8."""
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
                if part.source.nan is not None:
                    field[field == part.source.nan] = 0
                items[:, item, byte] |= field << to_shift
    if plane.running:
        words = items.view(np.uint32)
        words[:] = running_signs(words)
    return items.reshape(-1, plane.nbytes)


def random_weights(layout: Layout, rng: np.random.Generator, scale: float = 1.0) -> Bytes:
    """A repacked matrix of `random_blocks`."""
    count = layout.rows * layout.cols // layout.format.block
    return layout.pack(random_blocks(layout.format, count, rng, scale))
