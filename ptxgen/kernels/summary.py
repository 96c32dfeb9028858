"""Summaries of vectors, passed from one launch to the next (linear/prologue/_begun_norm.j2)."""

from __future__ import annotations

import numpy as np

from urdir.ptxgen.spec import Array
from urdir.ptxgen.weights.layout import TILE_ROWS

#: Values per group: the rows of a tile, so that one CTA has them all.
SUMMARY = TILE_ROWS


def summary(scaled: Array, vectors: Array) -> Array:
    """The summary (2, batch, values / 16) f32 of vectors (batch, values): for every 16 values the
    largest of ``scaled`` and the sum of the squares of ``vectors``.
    """
    groups = (len(vectors), -1, SUMMARY)
    largest = np.abs(scaled.reshape(groups)).max(axis=2)
    squares = np.square(vectors.reshape(groups).astype(np.float64)).sum(axis=2)
    return np.stack([largest, squares]).astype(np.float32)
