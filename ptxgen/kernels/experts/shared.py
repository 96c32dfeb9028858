"""An expert that all rows have, beside those that they choose, with matrices of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from urdir.ptxgen.kernels.experts.held import OfExperts
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import Layout


def shared_layout(of: OfExperts) -> Layout:
    """How a matrix of it lies in memory."""
    return Layout(of.layout.format, of.rows, of.cols)


def shared_params(of: OfExperts) -> tuple[Param, ...]:
    """Its matrices."""
    nbytes = (shared_layout(of).nbytes,)
    return tuple(Param(f"shared_{name}", "u8", nbytes, Access.IN) for name in of.matrices)


def shared_weights(of: OfExperts, inputs: Mapping[str, Any]) -> list[Array]:
    """Its weights (rows, cols) of each matrix."""
    return [shared_layout(of).unpack(inputs[f"shared_{name}"]) for name in of.matrices]
