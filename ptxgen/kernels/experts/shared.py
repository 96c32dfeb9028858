"""An expert that all rows have, beside those that they choose, with matrices of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.experts.spec import ExpertsProduct


def shared_layout(of: ExpertsProduct) -> Layout:
    """How a matrix of it lies in memory."""
    return Layout(of.format, of.rows, of.cols)


def shared_params(of: ExpertsProduct) -> tuple[Param, ...]:
    """Its matrices, of a product that has such an expert."""
    nbytes = (shared_layout(of).nbytes,)
    names = of.matrices if of.has_shared else ()
    return tuple(Param(f"shared_{name}", "u8", nbytes, Access.IN) for name in names)


def shared_weights(of: ExpertsProduct, inputs: dict[str, Any]) -> list[Array]:
    """Its weights (rows, cols) of each matrix."""
    return [shared_layout(of).unpack(inputs[f"shared_{name}"]) for name in of.matrices]


def check_shared(of: ExpertsProduct) -> None:
    """Raise PtxgenError where the product does not take it."""
    if of.has_shared and (of.held is not None or of.steps.has(Bias)):
        raise PtxgenError(f"{of.name}: an expert that all rows have has no bias and no cache")
