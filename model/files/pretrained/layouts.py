"""Arrangements of stored tensors: rows in another order, transposed matrices, changed vectors.

Functions of this module take the `Metadata` values by key that were read from config.json, and give
the rows of the stored tensor that a tensor of the description consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
Floats = NDArray[np.float32]
Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is made of stored ones.

    A stored tensor counts as one of ``shape``(keys), which may contain one -1. Its matrices
    (..., in, out) are ``transposed``, always or by keys and shape. Row i of the result is row
    ``rows``(keys, number of rows)[i]. Small tensors may be changed: rows are multiplied by
    ``factors``(keys, number of rows) and ``scale``(keys, values of a row), and replaced by
    ``values`` of them. Several stored tensors have a dimension of their own, unless they are
    ``joined``: rows of one matrix.
    """

    transposed: bool | Callable[[Keys, tuple[int, ...]], bool] = False
    rows: Callable[[Keys, int], Rows] | None = None
    factors: Callable[[Keys, int], Floats] | None = None
    scale: Callable[[Keys, int], float] | None = None
    values: Callable[[Floats], Floats] | None = None
    shape: Callable[[Keys], tuple[int, ...]] | None = None
    joined: bool = False


PLAIN = Layout()


def halves(keys: Keys, rows: int) -> Rows:
    """Rows in turns, the even ones of every matrix first."""
    each = 2 * int(keys["expert_feed_forward_length"])
    order = np.arange(rows).reshape(-1, each // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


def turned_experts(keys: Keys, shape: tuple[int, ...]) -> bool:
    """Whether experts are stored as (experts, in, out); older and newer files differ."""
    width, hidden = int(keys["expert_feed_forward_length"]), int(keys["embedding_length"])
    return shape[-2:] in ((hidden, 2 * width), (width, hidden))


def column(keys: Keys) -> tuple[int, ...]:
    """A vector as a matrix of one column."""
    return (-1, 1)


def row(keys: Keys) -> tuple[int, ...]:
    """A tensor as a vector."""
    return (-1,)


def groups(keys: Keys) -> tuple[int, ...]:
    """Values of each group of a state-space mixer."""
    return (int(keys["ssm.group_count"]), -1)


def taps(keys: Keys) -> tuple[int, ...]:
    """Channels and taps of a convolution."""
    return (-1, int(keys["ssm.conv_kernel"]))


def after(first: int) -> Callable[[Keys, int], Rows]:
    """All rows but the ``first`` ones."""

    def rows_after(keys: Keys, rows: int) -> Rows:
        if rows <= first:
            raise ValueError(f"more than {first} are needed")
        return np.arange(first, rows)

    return rows_after


def first_row(keys: Keys, rows: int) -> Rows:
    """The first row, if there is one."""
    return np.arange(min(rows, 1))


def padding_last(keys: Keys, rows: int) -> Rows:
    """The rows after that of padding, then this one."""
    padding = int(keys["own.padding"])
    if rows <= padding + 1:
        raise ValueError(f"more than {padding + 1} are needed")
    return np.append(np.arange(padding + 1, rows), padding)


def tokens_or_first(keys: Keys, rows: int) -> Rows:
    """A row for every token; tokens without one have the first one."""
    tokens = np.arange(int(keys["own.tokens"]))
    return np.where(tokens < rows, tokens, 0)


def negated_exp(values: Floats) -> Floats:
    """-exp(x): the decay that a logarithm stands for."""
    return -np.exp(values)


def exp(values: Floats) -> Floats:
    """exp(x)."""
    return np.exp(values)


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
        spans = list(pairwise(bounds))[parts]
        return np.concatenate([grouped[:, start:stop].reshape(-1) for start, stop in spans])

    return rows
