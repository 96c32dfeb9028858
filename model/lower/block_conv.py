"""Rules for what happens within blocks of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.graph.block_conv import ConvolveBlock
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule, alone
from urdir.ptxgen.kernels.speculation.block_conv import BlockConv


def lower_convolution(at: Lowering, of: ConvolveBlock) -> None:
    """A convolution around a network."""
    conv = of.of
    kernel = BlockConv(of.x.width, conv.taps, conv.group, of.side, of.x.rows, of.stride)
    weights = {"base": at.vector(conv.base), "dynamic": at.place(of.dynamic)}
    at.launch(kernel, of.label, x=at.place(of.x), y=at.place(of.y), **weights)


RULES: Sequence[Rule] = (alone("convolve_block", lower_convolution),)
