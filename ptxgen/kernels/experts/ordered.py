"""Columns of experts in orders of their own, of products that choose the experts themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, Param

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.experts.up import ExpertsUp

#: Which column of x each column of an expert's matrices is; from ``cols`` on, zeros.
ORDER = (Param("order", "f32", ("experts", "cols"), Access.IN),)


def check_order(of: ExpertsUp) -> None:
    """Raise PtxgenError for a product that does not bring x into orders."""
    if of.ordered and (of.selection is None or of.logit_parts is not None or of.has_shared):
        raise PtxgenError(f"{of.name}: x is brought into orders after a choice by logits alone")
    if of.ordered and of.cols % 32:
        raise PtxgenError(f"{of.name}: orders of {of.cols} columns: a multiple of 32")


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
