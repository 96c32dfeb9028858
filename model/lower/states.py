"""Kernels that move the states of sequences on: launches of their own, or the ends of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from urdir.model.families.recurrent import Recurrent
from urdir.model.families.rules import rule_of
from urdir.model.graph.recurrent import Convolve, Scan
from urdir.model.lower.arguments import without_none
from urdir.model.lower.early import precedes_mixture
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rows import Rows
from urdir.ptxgen.kernels.linear.epilogue.then import PREFIX, Then
from urdir.ptxgen.kernels.recurrent.choice import causal_conv, recurrences, selective_scan
from urdir.ptxgen.kernels.recurrent.drafted_rows import KEPT
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

    def following(self, at: Lowering) -> Then | None:
        """The kernel as the end of the product's launch, for a step of one decoded row."""
        if at.rows.count > 1 or at.rows.prompt:
            return None
        spec: Then = self.kernel(**_shape(at, at.rows) | {"segments": 0})
        return spec

    def launch(self, at: Lowering) -> dict[str, Slice]:
        """Arguments that the step adds to the launch of the product."""
        then = self.following(at)
        assert then is not None
        names = {param.name for param in then.params}
        given = {**self.arguments, **at.rows.recurrent_arguments}
        own = {name: of for name, of in given.items() if name in names}
        return {"y": self.y, **{PREFIX + name: of for name, of in own.items()}}

    def append(self, at: Lowering, product: Slice) -> None:
        """Append the step as a separate launch."""
        arguments = {**self.arguments, self.takes: product, "y": self.y}
        launch_recurrent(at, self.label, self.kernel, **arguments)


def convolution(at: Lowering, of: Convolve, packed: Slice | None = None) -> StateStep:
    """A convolution; of prompts y is ``packed`` as well, where that is given."""
    conv, gates = of.conv, {}
    if of.input_gate is not None and of.output_gate is not None:
        gates = {"input_gate": at.place(of.input_gate), "output_gate": at.place(of.output_gate)}
    kernel = partial(
        causal_conv,
        channels=conv.channels,
        taps=conv.taps,
        bias=conv.bias is not None,
        activation=of.f,
        gated=bool(gates),
        packs=packed is not None,
    )
    tail = recurrent_state(at, of.layer)[of.tail]
    arguments = {
        "weight": at.vector(conv.weight),
        "tail": tail,
        **gates,
        **without_none(packed=packed),
    }
    if conv.bias is not None:
        arguments["bias"] = at.vector(conv.bias)
    return StateStep(of.label, kernel, "x", arguments, at.place(of.y))


def append_convolutions(at: Lowering, ops: Sequence[Convolve]) -> None:
    """Append three convolutions alike, of rows that are decoded, as one launch."""
    steps = [convolution(at, of) for of in ops]
    arguments: dict[str, Slice] = {}
    for tag, op, step in zip(("", "1", "2"), ops, steps, strict=True):
        own = {**step.arguments, "x": at.place(op.x), "y": step.y}
        arguments |= {f"{name}{tag}": of for name, of in own.items()}
    kernel = partial(steps[0].kernel, beside=len(ops))
    launch_recurrent(at, steps[0].label, kernel, **arguments)


def scan(at: Lowering, of: Scan, packed: Slice | None = None) -> StateStep:
    """A selective scan; of prompts y is ``packed``, where that is given."""
    mixer = of.mixer
    arguments = {
        "x": at.place(of.u),
        "gate": at.place(of.gate),
        "b": at.place(of.b),
        "c": at.place(of.c),
        "a": at.vector(mixer.a),
        "skip": at.vector(mixer.skip),
        **_of_recurrence(at, of.layer),
    }
    kernel = partial(
        selective_scan,
        at.limits.sms,
        channels=mixer.conv.channels,
        size=mixer.size,
        packs=packed is not None,
    )
    return StateStep(of.label, kernel, "step", arguments, packed or at.place(of.y))


def launch_recurrent(
    at: Lowering, label: str, kernel: Callable[..., RecurrentRows], **arguments: Slice
) -> None:
    """A kernel over the states, to which all but the rows is given. Rows of prompts and others are
    launches of their own."""
    for start, rows in at.rows.parts:
        _launch_on(at, label, kernel(**_shape(at, rows)), start, rows, arguments)


def launch_heads(
    at: Lowering, label: str, mixer: Recurrent, layer: int, **arguments: Slice
) -> None:
    """The same of the mixer's recurrence of heads, whose state follows from the layer: of prompts
    two kernels."""
    rule = rule_of(mixer)
    assert rule is not None
    arguments |= _of_recurrence(at, layer)
    for start, rows in at.rows.parts:
        # On an H200 a step of one row of qwen3-next-80b-a3b takes 1,196 us so, else 1,214.
        starts = at.rows.count == 1 and not rows.segments and precedes_mixture(at)
        shape = _shape(at, rows) | {"exact": at.exact, "starts_next": starts}
        kernels = recurrences(at.limits.target, rule, **shape)
        for kernel in kernels:
            own = label if kernel is kernels[-1] else f"{label}.{kernel.name}"
            _launch_on(at, own, kernel, start, rows, arguments)


def _shape(at: Lowering, rows: Rows) -> dict[str, Any]:
    """Fields of `RecurrentRows`, and those of rows in sessions with drafts."""
    shape, states = at.parts.cache.shape, at.parts.recurrent
    assert states is not None
    return {
        "rows": rows.count,
        "sequences": shape.sequences,
        "max_len": shape.max_len,
        "segments": rows.segments,
        "most": states.shape.drafts,
        "drafted": rows.drafts > 0 and rows.count > 1,
    }


def _launch_on(
    at: Lowering,
    label: str,
    kernel: RecurrentRows,
    start: int,
    rows: Rows,
    arguments: Mapping[str, Slice],
) -> None:
    """A kernel on ``rows``, the first of which is row ``start`` of the step."""
    own = {**rows.recurrent_arguments, **arguments}
    for param in kernel.params:
        name = param.name
        if param.shape[0] == "rows" and name in arguments:
            nbytes = kernel.nbytes(param)
            own[name] = arguments[name].slice(start * nbytes // rows.count, nbytes)
        elif param.shape[0] == "slots":
            own[name] = at.work[f"chunk {name}"]
    taken = {param.name: own[param.name] for param in kernel.params}
    at.launch(kernel, label + (".prompts" if start else ""), **taken)


def recurrent_state(at: Lowering, layer: int) -> dict[str, Slice]:
    """The states of a layer, by name."""
    assert at.parts.recurrent is not None
    return at.parts.recurrent.arguments(layer)


def _of_recurrence(at: Lowering, layer: int) -> dict[str, Slice]:
    """Those of a layer's recurrence: the state, and kept inputs of drafts."""
    states = recurrent_state(at, layer)
    return {name: of for name, of in states.items() if name == "state" or name.startswith(KEPT)}
