"""Columns of experts in orders of their own: which column of x each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from urdir.ptxgen.spec import Access, Array, Param

#: Which column of x each column of an expert's matrices is; from ``cols`` on, zeros.
ORDER = (Param("order", "f32", ("experts", "cols"), Access.IN),)


def in_orders(x: Array, experts: Array, inputs: Mapping[str, Any]) -> Array:
    """x (batch, 1, cols) in the orders of ``experts`` (batch, used), (batch, used, cols); as it is
    without orders."""
    if "order" not in inputs:
        return x
    order, beyond = inputs["order"].astype(np.int64)[experts], x.shape[2]
    padded = np.append(x, np.zeros((len(x), 1, 1)), axis=2)
    return np.take_along_axis(padded, np.minimum(order, beyond), axis=2)


def random_orders(experts: int, cols: int, rng: np.random.Generator) -> Array:
    """Any orders, of several columns the last number beyond them."""
    orders = np.array([rng.permutation(cols) for _ in range(experts)], np.float32)
    if cols > 4:
        orders[:, -1] = cols
    return orders
