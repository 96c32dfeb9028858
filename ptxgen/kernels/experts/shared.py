"""An expert that all rows have, beside those that they choose, with matrices of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.kernels.experts.held import OfExperts
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.layout import Layout


class WithShared(OfExperts, Protocol):
    """A product with such an expert, in ``shared_slots`` slots: ``side_by_side`` if it adds up what
    its slots make, so that these are parts of the columns, else of the rows."""

    @property
    def shared_slots(self) -> int:
        """As many times as wide as a chosen expert."""

    @property
    def side_by_side(self) -> bool | None:
        """Whether slots are parts of the columns."""


def shared_layout(of: WithShared) -> Layout:
    """How a matrix of it lies in memory."""
    slots, side = of.shared_slots, of.side_by_side
    rows, cols = (of.rows, slots * of.cols) if side else (slots * of.rows, of.cols)
    return Layout(of.layout.format, rows, cols)


def shared_params(of: WithShared) -> tuple[Param, ...]:
    """Its matrices."""
    nbytes = (shared_layout(of).nbytes,)
    return tuple(Param(f"shared_{name}", "u8", nbytes, Access.IN) for name in of.matrices)


def shared_weights(of: WithShared, inputs: Mapping[str, Any]) -> list[Array]:
    """Its weights (shared_slots, rows, cols) of each matrix."""
    found = [shared_layout(of).unpack(inputs[f"shared_{name}"]) for name in of.matrices]
    if of.side_by_side:
        parts = (m.reshape(of.rows, of.shared_slots, of.cols) for m in found)
        return [np.moveaxis(part, 1, 0) for part in parts]
    return [m.reshape(of.shared_slots, of.rows, of.cols) for m in found]


def share_of_gate(gate: Array) -> float:
    """The sigmoid of its ``gate`` (1,)."""
    return 1.0 / (1.0 + float(np.exp(-gate.astype(np.float64)[0])))
