"""Connections of low rank between the streams of a residual and a block, as operations."""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.families.layers import LowRankConnection
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import Activate, Gate, Norm, Product, Scale
from urdir.model.graph.streams import JoinStreams
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.streams import STREAMS


def gated_mean(
    graph: Graph,
    named: Callable[[str], str],
    label: str,
    of: LowRankConnection,
    x: Tensor,
    y: Tensor,
) -> tuple[Tensor, Tensor]:
    """y, which is what a block reads of the streams x (see `LowRankConnection`), and their norm.
    ``named`` makes labels of launches."""
    normed = Tensor("normed streams", x.rows, x.width)
    normed = graph.add(Norm(named(f"{label}_norm"), normed, x, of.norm, y.width))

    def low() -> Tensor:
        return Tensor("stream low", x.rows, of.down.rows)

    made = graph.add(Product(named(f"{label}_down"), low(), normed, of.down))
    made = graph.add(Scale(named(f"{label}_down.scale"), low(), made, 1.0 / STREAMS))
    made = graph.add(Activate(named(f"{label}_down.silu"), low(), made, Activation("silu")))
    gates = Tensor("stream gates", x.rows, x.width)
    gates = graph.add(Product(named(f"{label}_up"), gates, made, of.up))
    gated, f = Tensor("gated streams", x.rows, x.width), Activation("sigmoid")
    gated = graph.add(Gate(named(f"{label}_gate"), gated, gates, normed, f))
    return graph.add(JoinStreams(named(f"{label}_read"), y, gated)), normed
