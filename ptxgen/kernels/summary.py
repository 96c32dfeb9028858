"""Summaries of vectors, passed from one launch to the next (linear/prologue/_begun_norm.j2)."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.spec import Array
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS
from urdir.ptxgen.weights.packed import columns_by_place

#: Values per group: the rows of a tile, so that one CTA has them all.
SUMMARY = TILE_ROWS
#: The same of many packed vectors: values that the lanes of a warp have.
PACKED_SUMMARY = 32


def summary(scaled: Array, vectors: Array) -> Array:
    """The summary (2, batch, values / 16) f32 of vectors (batch, values): for every 16 values the
    largest of ``scaled`` and the sum of the squares of ``vectors``.
    """
    groups = (len(vectors), -1, SUMMARY)
    largest = np.abs(scaled.reshape(groups)).max(axis=2)
    squares = np.square(vectors.reshape(groups).astype(np.float64)).sum(axis=2)
    return np.stack([largest, squares]).astype(np.float32)


def packed_squares(vectors: Array) -> Array:
    """The sums (1, batch, values / 32) f32 of the squares of many vectors (batch, values) that are
    left packed: of every 32 values in the order of `weights.packed`. Values: a multiple of 256."""
    tiles = vectors.astype(np.float64).reshape(len(vectors), -1, TILE_COLS)
    groups = tiles[:, :, columns_by_place()].reshape(1, len(vectors), -1, PACKED_SUMMARY)
    squares: Array = np.square(groups).sum(axis=3).astype(np.float32)
    return squares
