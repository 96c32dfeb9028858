"""Activations as f16 in the order in which tensor cores multiply them with repacked weights.

Places of the depth come in slices of 64. Of each slice, eight activation vectors after another, lie
8 x 8 matrices of halves (`_wgmma.j2`), eight along the depth: (slices, groups of 8 vectors, 8,
8 vectors, 8 places). One run of bytes then holds a slice of any number of neighbouring vectors.

A lane has units t and t + 4 of the 256 columns of a tile of weights, and takes four neighbouring
columns of one of them a step, b = 0 ... 3: bytes of a word, of which a mask gives 0 and 2, or 1 and
3. So columns change places. Column 32u + 4j + b of a tile, with t = u % 4 and i = u / 4, is in
slice 2i + j / 4, in its matrix 2(j % 4) + b % 2, and there at place 2t + b / 2. Places beyond the
last column are 0.

Values are a sixteenth of the activations: up to 1,048,064 they do not overflow, and f16 keeps its
precision down to 0.001. What is beyond becomes the largest f16, NaN stays NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.spec import Array, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS

#: Places of a slice, and vectors of a group.
SLICE, GROUP = 64, 8
#: Slices of a tile of weights.
TILE_SLICES = TILE_COLS // SLICE
#: What activations are multiplied with.
SCALE = 2.0**-4
#: The largest value.
LARGEST = 65504.0
#: Bytes of a slice of a group.
GROUP_NBYTES = 2 * SLICE * GROUP


def packed_shape(rows: int, cols: int) -> tuple[int, int, int, int, int]:
    """The shape of ``rows`` packed activation vectors of ``cols`` each."""
    slices = TILE_SLICES * ceil_div(cols, TILE_COLS)
    return slices, ceil_div(rows, GROUP), SLICE // GROUP, GROUP, GROUP


def packed_nbytes(rows: int, cols: int) -> int:
    """Bytes of as many."""
    slices, groups = packed_shape(rows, cols)[:2]
    return slices * groups * GROUP_NBYTES


@functools.cache
def columns_by_place() -> npt.NDArray[np.intp]:
    """The column of a tile that has each place, (TILE_COLS,)."""
    column = np.arange(TILE_COLS)
    unit, j, b = column // 32, column % 32 // 4, column % 4
    piece = 2 * (unit // 4) + j // 4
    place = SLICE * piece + 8 * (2 * (j % 4) + b % 2) + 2 * (unit % 4) + b // 2
    return np.argsort(place)


def pack(x: npt.NDArray[Any]) -> Array:
    """Activations (rows, cols) -> f16 of `packed_shape`."""
    rows, cols = x.shape
    shape = packed_shape(rows, cols)
    padded = np.zeros((shape[1] * GROUP, shape[0] * SLICE))
    padded[:rows, :cols] = x
    tiles = padded.reshape(len(padded), shape[0] * SLICE // TILE_COLS, TILE_COLS)
    placed = tiles[:, :, columns_by_place()]
    halves = np.clip(placed * SCALE, -LARGEST, LARGEST).astype(np.float16)
    by_matrix = halves.reshape(shape[1], GROUP, shape[0], GROUP, GROUP)
    return np.ascontiguousarray(by_matrix.transpose(2, 0, 3, 1, 4))


def unpack(packed: npt.NDArray[Any], rows: int, cols: int) -> npt.NDArray[np.float64]:
    """The other way, (rows, cols) f64."""
    slices, groups = packed.shape[:2]
    by_row = packed.transpose(1, 3, 0, 2, 4).reshape(groups * GROUP, -1, TILE_COLS)[:rows]
    columns = np.empty(by_row.shape)
    columns[:, :, columns_by_place()] = by_row.astype(np.float64) / SCALE
    found: npt.NDArray[np.float64] = columns.reshape(rows, slices * SLICE)[:, :cols]
    return found
