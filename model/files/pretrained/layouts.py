"""Arrangements of stored tensors: rows in another order, transposed matrices, changed vectors.

Functions of this module take the `Metadata` values by key that were read from config.json, and give
the rows of the stored tensor that a tensor of the description consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
Floats = NDArray[np.float32]
Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is made of stored ones.

    A stored matrix (..., in, out) is ``transposed`` first. Then row i of the result is row
    ``rows``(keys, number of stored rows)[i], for a vector likewise its value, and is multiplied by
    ``factors``(keys)[i]. ``values`` changes a vector; ``shape`` is its new shape, with -1.
    """

    transposed: bool = False
    rows: Callable[[Keys, int], Rows] | None = None
    factors: Callable[[Keys], Floats] | None = None
    values: Callable[[Floats], Floats] | None = None
    shape: tuple[int, ...] | None = None


PLAIN = Layout()


def halves(keys: Keys, rows: int) -> Rows:
    """Rows in turns, the even ones of every matrix first."""
    each = 2 * int(keys["expert_feed_forward_length"])
    order = np.arange(rows).reshape(-1, each // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def negated_exp(values: Floats) -> Floats:
    """-exp(x): the decay that a logarithm stands for."""
    return -np.exp(values)


def plus_one(values: Floats) -> Floats:
    """1 + x."""
    return values + np.float32(1.0)


def by_key_head(parts: slice) -> Callable[[Keys, int], Rows]:
    """Rows of Qwen3-Next's fused projection, which stores for each key head its query, its key, and
    the values and gates of its value heads: some of these four parts, each for all heads."""

    def rows(keys: Keys, count: int) -> Rows:
        heads, values = int(keys["ssm.group_count"]), int(keys["ssm.time_step_rank"])
        dim = int(keys["ssm.state_size"])
        group = values // heads * dim
        bounds = np.cumsum([0, dim, dim, group, group])
        grouped = np.arange(count).reshape(heads, -1)
        spans = list(zip(bounds[:-1], bounds[1:], strict=True))[parts]
        return np.concatenate([grouped[:, start:stop].reshape(-1) for start, stop in spans])

    return rows
