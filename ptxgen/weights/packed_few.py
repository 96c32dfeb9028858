"""Up to eight activation vectors as f16, in the orders in which `GemmSmall` multiplies them.

Eight values lie together, a pair of quads (four neighbouring columns each), and of a quad columns
0, 2, 1, 3: those that a mask gives of a word of quants (`halves`) are neighbours. Of a block of 256
columns that is

- by units: (8 units, 8 vectors, 4 lanes, 8 values), if a lane has a pair of each unit's quads;
- by lanes: (2, 4 pairs, 8 vectors, 4 lanes, 8 values), if it has all of units t and t + 4.

The type of the weights decides (`Halves.order`).

Values are a sixteenth of the activations, and of the second quad of a pair a 256th: the quants that
they are multiplied with may be sixteen times as large, being the upper halves of bytes. Up to
1,048,064 they do not overflow, and f16 keeps its precision down to 0.001, or 0.016. What is beyond
becomes the largest f16, NaN stays NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.spec import Array, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_UNITS
from urdir.ptxgen.weights.packed import GROUP, LARGEST, SCALE

Order = Literal["units", "lanes"]

#: Lanes of a vector, and values that each has of a unit.
LANES, VALUES = 4, 8
#: What packed activations are multiplied with beside `SCALE`, by the quad of a pair.
SHRINK = np.array([1.0, 2.0**-4])


def few_shape(cols: int) -> tuple[int, int, int, int, int]:
    """The shape of up to eight packed vectors of ``cols``."""
    return ceil_div(cols, TILE_COLS), TILE_UNITS, GROUP, LANES, VALUES


def pack_few(x: npt.NDArray[Any], order: Order = "units") -> Array:
    """Activations (rows, cols), up to eight rows -> f16 of `few_shape`; other vectors are zeros."""
    rows, cols = x.shape
    shape = few_shape(cols)
    padded = np.zeros((GROUP, shape[0] * TILE_COLS))
    padded[:rows, :cols] = np.clip(x * SCALE, -LARGEST, LARGEST)
    pairs = padded.reshape(GROUP, -1, TILE_UNITS, LANES, 2, 2, 2) * SHRINK[:, None, None]
    halves = pairs.astype(np.float16)
    few = np.ascontiguousarray(halves.transpose(1, 2, 0, 3, 4, 6, 5)).reshape(shape)
    return few if order == "units" else _exchanged(few)


def _exchanged(few: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """From one order to the other: units of half a block and pairs of a unit change places."""
    parts = few.reshape(-1, 2, TILE_UNITS // 2, GROUP, LANES, VALUES)
    return np.ascontiguousarray(parts.transpose(0, 1, 4, 3, 2, 5)).reshape(few.shape)


def with_few(before: Array, x: npt.NDArray[Any], order: Order = "units") -> Array:
    """What ``before`` is when x (rows, cols) has come: vectors beyond its rows stay as they were,
    whatever they hold."""
    made = before.copy()
    made[:, :, : len(x)] = pack_few(x, order)[:, :, : len(x)]
    return made


def unpack_few(
    few: npt.NDArray[Any], rows: int, cols: int, order: Order = "units"
) -> npt.NDArray[np.float64]:
    """The other way, (rows, cols) f64."""
    few = few if order == "units" else _exchanged(few)
    pairs = few.astype(np.float64).reshape(-1, TILE_UNITS, GROUP, LANES, 2, 2, 2)
    placed = (pairs / SHRINK[:, None, None] / SCALE).transpose(2, 0, 1, 3, 4, 6, 5)
    return np.ascontiguousarray(placed).reshape(GROUP, len(few) * TILE_COLS)[:rows, :cols]
