"""Kernels that move the states of sequences on: launches of their own, or the ends of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from urdir.model.blocks.linear_vectors import Continuation
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.recurrent import Convolution
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class StateStep:
    """A kernel that takes a product, its parameter ``takes``, and makes y; ``kernel`` is given all
    but the rows, and ``arguments`` are all others but those of the rows."""

    label: str
    kernel: Callable[..., Any]
    takes: str
    arguments: Mapping[str, Slice]
    y: Slice

    def following(self, at: LayerStep) -> Continuation | None:
        """The step as the end of the product's launch, where there is one row, of no prompt."""
        if at.rows.count > 1 or at.rows.prompt:
            return None
        shape = at.parts.cache.shape
        spec = self.kernel(rows=1, sequences=shape.sequences, max_len=shape.max_len, segments=0)
        return Continuation(spec, {**self.arguments, **at.rows.recurrent_arguments}, self.y)

    def append(self, at: LayerStep, product: Slice) -> None:
        """The step as a launch of its own."""
        given = {**self.arguments, self.takes: product, "y": self.y}
        launch_recurrent(at, self.label, self.kernel, **given)


def convolution(
    at: LayerStep,
    label: str,
    conv: Convolution,
    activation: Activation | None,
    tail: Slice,
    y: Slice,
    **gates: Slice,
) -> StateStep:
    """y = the convolution of a product whose last values are in ``tail``; between gates where they
    are given."""
    kernel = partial(
        CausalConv,
        channels=conv.channels,
        taps=conv.taps,
        bias=conv.bias is not None,
        activation=activation,
        gated=bool(gates),
    )
    arguments = {"weight": at.vector(conv.weight), "tail": tail, **gates}
    if conv.bias is not None:
        arguments["bias"] = at.vector(conv.bias)
    return StateStep(label, kernel, "x", arguments, y)


def launch_recurrent(
    at: LayerStep, label: str, kernel: Callable[..., RecurrentRows], **arguments: Slice
) -> None:
    """A kernel over the states, to which all but the rows is given. Rows of prompts and others are
    launches of their own."""
    shape = at.parts.cache.shape
    for start, rows in at.rows.parts:
        spec = kernel(
            rows=rows.count,
            sequences=shape.sequences,
            max_len=shape.max_len,
            segments=rows.segments,
        )
        given = arguments | rows.recurrent_arguments
        for param in spec.params:
            if param.shape[0] == "rows" and param.name in arguments:
                nbytes = spec.nbytes(param)
                first = start * nbytes // rows.count
                given[param.name] = arguments[param.name].slice(first, nbytes)
        at.plan.launch(spec, at.name(label) + (".prompts" if start else ""), **given)


def recurrent_state(at: LayerStep) -> dict[str, Slice]:
    """The layer's states, by name."""
    assert at.parts.recurrent is not None
    return at.parts.recurrent.arguments(at.index)
