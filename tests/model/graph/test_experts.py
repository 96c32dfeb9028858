"""Mixtures evaluated: columns of experts in orders of their own, against sums written out."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.model.families.stored import Linear, StoredMatrix, StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.experts import Experts
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Selection

HIDDEN, WIDTH, EXPERTS, ROWS = 6, 5, 3, 4


def mixture(ordered: tuple[str, ...]) -> Experts:
    def linear(name: str, rows: int, cols: int) -> Linear:
        order = StoredVector.whole(f"{name}.order", EXPERTS, cols) if name in ordered else None
        return Linear(StoredMatrix.whole(name, EXPERTS, rows, cols), order=order)

    x, routing = Tensor("x", ROWS, HIDDEN), Tensor("routing", ROWS, EXPERTS)
    up, down, gate = (
        linear("up", WIDTH, HIDDEN),
        linear("down", HIDDEN, WIDTH),
        linear("gate", WIDTH, HIDDEN),
    )
    given = x, routing, Selection(EXPERTS, 2), up, down, gate, Activation("silu")
    return Experts("experts", Tensor("y", ROWS, HIDDEN), *given)


def test_columns_in_orders_of_the_experts() -> None:
    rng, op = np.random.default_rng(0), mixture(("gate", "up"))
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "gate": (WIDTH, HIDDEN)}
    matrices = {name: rng.standard_normal((EXPERTS, *shape)) for name, shape in shapes.items()}
    orders = {
        f"{name}.order": np.array([rng.permutation(HIDDEN) for _ in range(EXPERTS)])
        for name in ("gate", "up")
    }

    class Values:
        def matrix(self, stored: StoredMatrix) -> Floats:
            return matrices[stored.name].reshape(-1, stored.cols)

        def vector(self, stored: StoredVector) -> Floats:
            return orders[stored.name].ravel().astype(np.float64)

    x = rng.standard_normal((ROWS, HIDDEN))
    routing = rng.random((ROWS, EXPERTS)) * (rng.permuted(np.eye(EXPERTS)[[0, 1, 2, 0]], axis=1))
    found = op.evaluate(Evaluation(Values(), range(ROWS)), x, routing)
    wanted = np.zeros_like(found)
    for row, expert in zip(*np.nonzero(routing), strict=True):
        gate, up = np.zeros(WIDTH), np.zeros(WIDTH)
        for column in range(HIDDEN):
            gate += (
                matrices["gate"][expert, :, column] * x[row, orders["gate.order"][expert, column]]
            )
            up += matrices["up"][expert, :, column] * x[row, orders["up.order"][expert, column]]
        middle = gate / (1 + np.exp(-gate)) * up
        wanted[row] += routing[row, expert] * (matrices["down"][expert] @ middle)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    assert op.is_ordered
    assert not mixture(()).is_ordered


def test_an_order_of_the_last_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="order of columns"):
        mixture(("down",))
