"""Operations that cannot be are refused where they are made."""

from __future__ import annotations

import pytest

from urdir.model.families.recurrent import Convolution
from urdir.model.families.stored import StoredVector
from urdir.model.graph.recurrent import Convolve
from urdir.model.graph.tensor import Tensor

X, GATE = Tensor("x", 3, 8), Tensor("gate", 3, 8)
CONV = Convolution(StoredVector("conv", (8, 4), 0, 32))


def convolve(before: Tensor | None, after: Tensor | None) -> Convolve:
    y = Tensor("y", 3, 8)
    return Convolve("conv", y, X, CONV, None, 0, input_gate=before, output_gate=after)


def test_a_convolution_has_both_gates_or_none() -> None:
    for gates in ((None, None), (GATE, GATE)):
        convolve(*gates)
    for one in ((GATE, None), (None, GATE)):
        with pytest.raises(ValueError, match=r"conv: .*both gates or none"):
            convolve(*one)


def test_a_convolution_has_a_weight_for_each_channel() -> None:
    other = Convolution(StoredVector("conv", (6, 4), 0, 24))
    with pytest.raises(ValueError, match="6 channels"):
        Convolve("conv", Tensor("y", 3, 8), X, other, None, 0)
