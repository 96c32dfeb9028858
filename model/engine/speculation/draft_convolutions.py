"""Convolutions around the networks of a DFlash2 layer (`families.dflash2`), as operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.graph.block_conv import ConvolveBlock
from urdir.model.graph.tensor import Tensor

if TYPE_CHECKING:
    from urdir.model.families.dflash2 import Convolution
    from urdir.model.layers.builder import LayerOps

#: What rows add to the weights around attention, f32, in the draft's workspace.
DYNAMIC = "dynamic weights"


def convolved_before(
    at: LayerOps, network: str, of: Convolution | None, x: Tensor, stride: int
) -> tuple[Tensor, Tensor | None]:
    """The input of a network, and what its rows add to weights; x itself without a convolution. The
    rows of a block are ``stride`` rows apart."""
    if of is None:
        return x, None
    dynamic = at.product(f"{network}_conv_proj", x, of.dynamic, f"{network} {DYNAMIC}")
    return _convolved(at, network, of, x, dynamic, (0, stride)), dynamic


def convolved_after(
    at: LayerOps,
    network: str,
    of: Convolution | None,
    x: Tensor,
    dynamic: Tensor | None,
    stride: int,
) -> Tensor:
    """The same of what the network makes, by the weights that its input had."""
    if of is None or dynamic is None:
        return x
    return _convolved(at, network, of, x, dynamic, (1, stride))


def _convolved(
    at: LayerOps,
    network: str,
    of: Convolution,
    x: Tensor,
    dynamic: Tensor,
    at_side: tuple[int, int],
) -> Tensor:
    side, stride = at_side
    label = at.name(f"{network}_conv.{side}")
    y = Tensor(f"{network} convolved {side}", x.rows, x.width)
    return at.graph.add(ConvolveBlock(label, y, x, dynamic, of, side, stride))
