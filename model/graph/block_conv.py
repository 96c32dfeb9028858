"""Convolutions within blocks of drafts as operations."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.families.dflash2 import Convolution
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.speculation.block_conv import BlockConv


@dataclass(frozen=True, slots=True, eq=False)
class ConvolveBlock(Op):
    """y[i, c] = the sum over taps t of (base[side, t, c] + dynamic[i, side, t, c / group]) *
    x[i - t * stride, c]: see `families.dflash2`. The rows of a block are ``stride`` rows apart."""

    word = "convolve_block"
    x: Tensor
    dynamic: Tensor
    of: Convolution
    side: int
    stride: int

    def __post_init__(self) -> None:
        self._check_same(self.x)
        size = 2 * self.of.taps * self.x.width // self.of.group
        self._check(self.dynamic.width == size, f"{self.dynamic.width} weights a row, not {size}")
        self._check(self.of.base.size == size * self.of.group, "weights of another width")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        """See `Op`."""
        rows, width = x[0].shape
        kernel = BlockConv(width, self.of.taps, self.of.group, self.side, rows, self.stride)
        y: Floats = kernel.convolved(x[0], at.vector(self.of.base), x[1])
        return y
