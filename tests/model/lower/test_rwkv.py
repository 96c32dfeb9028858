"""Products of as many vectors, and products of low rank, as launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.model.lower.workbench import Workbench
from urdir.driver.device import Device
from urdir.model.families.rwkv import LowRank
from urdir.model.graph.ops import Add, Product
from urdir.model.graph.rwkv import LowRanks
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation

Make = Callable[..., Workbench]


@pytest.fixture
def make(emulator: Device, request: pytest.FixtureRequest) -> Make:
    def build(rows: int, exact: bool = True) -> Workbench:
        bench = Workbench(emulator, rows, exact, 7)
        request.addfinalizer(bench.close)
        return bench

    return build


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 3)])
def test_products_of_as_many_vectors_are_one_launch(make: Make, rows: int, count: int) -> None:
    made = make(rows)
    expected = []
    for number, width in enumerate((35, 64, 17)):
        x, values = made.input(96, f"x{number}")
        linear, weights, bias = made.linear(width, 96, bias=number == 1)
        y = made.out(width, f"y{number}")
        made.add(Product, f"product {number}", y, x, linear)
        expected.append((y, values @ weights.T + bias))
    assert len(made.run()) == count
    for y, values in expected:
        made.compare(y, values, 1e-6)


def test_a_product_of_another_s_result_is_a_launch_of_its_own(make: Make) -> None:
    made = make(1)
    (first, a), (second, b) = made.input(64, "x0"), made.input(64, "x1")
    linears = [made.linear(64, 64) for _ in range(3)]
    ys = [made.out(64, f"y{number}") for number in range(3)]
    for number, x in enumerate((first, second, ys[0])):
        made.add(Product, f"product {number}", ys[number], x, linears[number][0])
    assert len(made.run()) == 2
    first_values = a @ linears[0][1].T
    made.compare(ys[1], b @ linears[1][1].T, 1e-6)
    made.compare(ys[2], first_values @ linears[2][1].T, 1e-6)


def test_a_sum_after_two_products_is_a_part_of_the_second(make: Make) -> None:
    made = make(1)
    (first, a), (second, b), (stream, before) = (made.input(64, f"x{n}") for n in range(3))
    (w, weights, _), (u, others, _) = made.linear(64, 64), made.linear(64, 64)
    y, product, total = made.out(64, "y"), Tensor("product", 1, 64), made.out(64, "total")
    made.add(Product, "first", y, first, w)
    made.add(Product, "second", product, second, u)
    made.add(Add, "sum", total, stream, product)
    assert len(made.run()) == 2
    made.compare(y, a @ weights.T, 1e-6)
    made.compare(total, before + b @ others.T, 1e-6)


@pytest.mark.parametrize(
    ("rows", "types", "names"),
    [
        (1, ("F32", "F16"), {"low_ranks"}),
        (5, ("F32", "F16"), {"low_ranks"}),
        (1, ("Q8_0", "Q8_0"), {"gemv"}),
    ],
)
def test_products_of_low_rank(make: Make, rows: int, types: Any, names: set[str]) -> None:
    made = make(rows)
    tanh = Activation("tanh")
    inputs, products, results, expected = [], [], [], []
    for number, (kind, f) in enumerate(zip(types, (tanh, None), strict=True)):
        x, values = made.input(160, f"x{number}")
        down, weights, _ = made.linear(32, 160, fmt=kind)
        up, more, bias = made.linear(75, 32, bias=True, fmt=kind)
        low = values @ weights.T
        expected.append((low if f is None else np.tanh(low)) @ more.T + bias)
        inputs.append(x)
        products.append(LowRank(down, up, f))
        results.append(made.out(75, f"y{number}"))
    given = tuple(inputs), tuple(products), tuple(results)
    made.add(LowRanks, "low ranks", results[0], *given)
    found = made.run()
    assert (set(found), len(found)) == (names, 2 if names == {"low_ranks"} else 4)
    for y, values in zip(results, expected, strict=True):
        made.compare(y, values, 1e-5)
