"""Kernels that move the states of sequences on: launches of their own, or the ends of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from urdir.model.blocks.linear_vectors import Continuation
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.recurrent import Convolution, Recurrent
from urdir.model.families.rules import rule_of
from urdir.model.lower.arguments import given
from urdir.model.lower.rows import Rows
from urdir.model.memory.chunk_workspace import chunk_buffer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.choice import causal_conv, recurrences
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
    packed: Slice | None = None,
    **gates: Slice,
) -> StateStep:
    """y = the convolution of a product whose last values are in ``tail``; between gates where they
    are given. Of prompts y is ``packed`` as well, where that is given."""
    kernel = partial(
        causal_conv,
        channels=conv.channels,
        taps=conv.taps,
        bias=conv.bias is not None,
        activation=activation,
        gated=bool(gates),
        packs=packed is not None,
    )
    arguments = {"weight": at.vector(conv.weight), "tail": tail, **gates, **given(packed=packed)}
    if conv.bias is not None:
        arguments["bias"] = at.vector(conv.bias)
    return StateStep(label, kernel, "x", arguments, y)


def launch_recurrent(
    at: LayerStep, label: str, kernel: Callable[..., RecurrentRows], **arguments: Slice
) -> None:
    """A kernel over the states, to which all but the rows is given. Rows of prompts and others are
    launches of their own."""
    for start, rows in at.rows.parts:
        _launch_on(at, label, kernel(**_shape(at, rows)), start, rows, arguments)


def launch_heads(at: LayerStep, label: str, mixer: Recurrent, **arguments: Slice) -> None:
    """The same of the mixer's recurrence of heads, whose state follows from the layer: of prompts
    two kernels."""
    rule = rule_of(mixer)
    assert rule is not None
    target, exact = at.parts.device.native_target, at.parts.exact
    arguments["state"] = recurrent_state(at)["state"]
    for start, rows in at.rows.parts:
        kernels = recurrences(target, exact=exact, **_shape(at, rows), **rule)
        for kernel in kernels:
            own = label if kernel is kernels[-1] else f"{label}.{kernel.name}"
            _launch_on(at, own, kernel, start, rows, arguments)


def _shape(at: LayerStep, rows: Rows) -> dict[str, int]:
    """Fields of `RecurrentRows`."""
    shape = at.parts.cache.shape
    return {
        "rows": rows.count,
        "sequences": shape.sequences,
        "max_len": shape.max_len,
        "segments": rows.segments,
    }


def _launch_on(
    at: LayerStep,
    label: str,
    kernel: RecurrentRows,
    start: int,
    rows: Rows,
    arguments: Mapping[str, Slice],
) -> None:
    """A kernel on ``rows``, the first of which is row ``start`` of the step."""
    given = {**rows.recurrent_arguments, **arguments}
    for param in kernel.params:
        name = param.name
        if param.shape[0] == "rows" and name in arguments:
            nbytes = kernel.nbytes(param)
            given[name] = arguments[name].slice(start * nbytes // rows.count, nbytes)
        elif param.shape[0] == "slots":
            given[name] = at.work[chunk_buffer(name)]
    taken = {param.name: given[param.name] for param in kernel.params}
    at.plan.launch(kernel, at.name(label) + (".prompts" if start else ""), **taken)


def recurrent_state(at: LayerStep) -> dict[str, Slice]:
    """The layer's states, by name."""
    assert at.parts.recurrent is not None
    return at.parts.recurrent.arguments(at.index)
