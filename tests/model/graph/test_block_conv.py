"""Convolutions within blocks, evaluated, against sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.model.families.dflash2 import Convolution
from urdir.model.families.stored import Linear, StoredMatrix, StoredVector
from urdir.model.graph.block_conv import ConvolveBlock
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.tensor import Tensor

WIDTH, TAPS, GROUP, ROWS, STRIDE = 12, 3, 4, 7, 2


def operation(side: int, dynamic: int = 2 * TAPS * WIDTH // GROUP) -> ConvolveBlock:
    base = StoredVector.whole("base", 2, TAPS, WIDTH)
    of = Convolution(base, Linear(StoredMatrix.whole("proj", dynamic, WIDTH)), TAPS, GROUP)
    x, added = Tensor("x", ROWS, WIDTH), Tensor("dynamic", ROWS, dynamic)
    return ConvolveBlock("conv", Tensor("y", ROWS, WIDTH), x, added, of, side, STRIDE)


@pytest.mark.parametrize("side", [0, 1])
def test_rows_of_a_block_are_summed_with_their_own_weights(side: int) -> None:
    rng, op = np.random.default_rng(side), operation(side)
    values = rng.standard_normal((2, TAPS, WIDTH))

    class Values:
        def matrix(self, stored: StoredMatrix) -> Floats:
            raise AssertionError

        def vector(self, stored: StoredVector) -> Floats:
            return values.ravel()

    x, added = rng.standard_normal((ROWS, WIDTH)), rng.standard_normal((ROWS, 2, TAPS, 3))
    found = op.evaluate(Evaluation(Values(), range(ROWS)), x, added.reshape(ROWS, -1))
    for row in range(ROWS):
        for column in range(WIDTH):
            wanted: Any = 0.0
            for tap in range(TAPS):
                if row - tap * STRIDE >= 0:
                    weight = values[side, tap, column] + added[row, side, tap, column // GROUP]
                    wanted += weight * x[row - tap * STRIDE, column]
            assert found[row, column] == pytest.approx(wanted)


def test_weights_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="12 weights a row, not 18"):
        operation(0, dynamic=12)
