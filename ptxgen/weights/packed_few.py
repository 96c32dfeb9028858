"""Up to eight activation vectors as f16, in the order in which `GemmSmall` multiplies them.

Columns of a block of 256 change places as in `packed`, and values are a sixteenth, too. But what
each lane needs lies together: (blocks, 8, 8 vectors, 4 lanes, 8 values). The eight values are those
of the lane's places in four neighbouring matrices, two each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.spec import Array, ceil_div
from urdir.ptxgen.weights import packed
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP

#: Matrices that a lane reads at once, and the lanes of a vector.
TOGETHER, LANES = 4, 4


def few_shape(cols: int) -> tuple[int, int, int, int, int]:
    """The shape of up to eight packed vectors of ``cols``."""
    return ceil_div(cols, TILE_COLS), TILE_COLS // 32, GROUP, LANES, 2 * TOGETHER


def pack_few(x: npt.NDArray[Any]) -> Array:
    """Activations (rows, cols), up to eight rows -> f16 of `few_shape`; other vectors are zeros."""
    blocks, pieces, *_ = shape = few_shape(x.shape[1])
    matrices = packed.pack(x).reshape(blocks, pieces, TOGETHER, GROUP, LANES, 2)
    return np.ascontiguousarray(matrices.transpose(0, 1, 3, 4, 2, 5)).reshape(shape)


def with_few(before: Array, x: npt.NDArray[Any]) -> Array:
    """What ``before`` is when x (rows, cols) has come: vectors beyond its rows stay as they were,
    whatever they hold."""
    made = before.copy()
    made[:, :, : len(x)] = pack_few(x)[:, :, : len(x)]
    return made


def unpack_few(few: npt.NDArray[Any], rows: int, cols: int) -> npt.NDArray[np.float64]:
    """The other way, (rows, cols) f64."""
    blocks, pieces = few.shape[:2]
    lanes = few.reshape(blocks, pieces, GROUP, LANES, TOGETHER, 2)
    matrices = np.ascontiguousarray(lanes.transpose(0, 1, 4, 2, 3, 5))
    return packed.unpack(matrices.reshape(packed.packed_shape(GROUP, cols)), rows, cols)
