"""What the vectors of a product are when its launch begins, and what follows it: parts of a
`LinearRequest`, and the arguments that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.arguments import given
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.choice import LinearRequest
from urdir.ptxgen.kernels.linear.epilogue.then import PREFIX, Then
from urdir.ptxgen.kernels.linear.spec import LinearSpec

if TYPE_CHECKING:
    from urdir.driver.memory import PinnedBuffer, Slice


class Ends(NamedTuple):
    """What follows a product, in this order (`LinearSpec`)."""

    activation: Activation | None = None
    scale: float = 1.0
    softcap: float = 0.0
    clamp: float = 0.0


class Continuation(NamedTuple):
    """A recurrent kernel of one token that takes a product: its other arguments, and its result."""

    kernel: Then
    arguments: Mapping[str, Slice]
    y: Slice

    @property
    def launch(self) -> dict[str, Slice]:
        """The arguments of a launch of which it is the end."""
        return {"y": self.y, **{PREFIX + name: of for name, of in self.arguments.items()}}


def gated(request: LinearRequest, x: Activations) -> LinearRequest:
    """The request of a launch that takes x through the gate that is due."""
    return request if x.gate is None else replace(request, gate=x.gate.of)


def gate_arguments(x: Activations) -> dict[str, Slice]:
    """The arguments of such a launch."""
    if x.gate is None:
        return {}
    return given(x_gate=x.gate.x_gate, head_norm=x.gate.head_norm)


def normalising(request: LinearRequest, x: Activations, norm: NormLayer | None) -> LinearRequest:
    """The request of a launch that computes the norm, or what is left of it, and the sum before it
    that is due."""
    if x.due is not None:
        due = x.due
        request = replace(request, after=due.after, stream_scaled=due.scale is not None)
    if norm is None:
        return replace(request, packed=x.packed is not None)
    begun = replace(request, norm=norm.norm, summarised=True, packed=x.scaled_is_packed)
    if x.has_begun(norm) and (begun.takes_packed or not begun.packed):
        return begun
    return replace(request, norm=norm.norm)


def vectors(
    kernel: LinearSpec, x: Activations, norm: NormLayer | None, first: int
) -> Mapping[str, Slice | PinnedBuffer]:
    """The arguments of a launch for the vectors from ``first`` on."""
    if kernel.summarised:
        return given(x=x.scaled, x_summary=x.summary)
    weights = {} if norm is None else given(norm=norm.weight, norm_bias=norm.bias)
    if (due := x.due) is not None:
        return {"x": due.delta, "before": due.before, "stream": x.x, **due.arguments, **weights}
    if kernel.packed:
        return {"x": x.x.slice(0, kernel.nbytes(kernel.param("x")))}
    x_of = rows_of(x.x, first, kernel.batch, kernel.cols)
    return {"x": x_of, **gate_arguments(x), **weights}


def result(kernel: LinearSpec, y: Slice, first: int, number: int = 0) -> Slice:
    """Where the launch for the vectors from ``first`` on leaves its product of that number."""
    if kernel.packs:
        return y.slice(0, kernel.nbytes(kernel.param("y")))
    return rows_of(y, first, kernel.batch, kernel.parts[number].rows)


def rows_of(matrix: Slice, first: int, count: int, width: int) -> Slice:
    """Some rows of a (rows, width) f32 buffer."""
    return matrix.slice(4 * first * width, 4 * count * width)
