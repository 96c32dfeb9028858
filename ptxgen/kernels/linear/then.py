"""What may follow a product in its launch: the step of a recurrent kernel that takes it.

A thread that has the sum of a row goes on with that row's state, so that one launch does what two
would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import Access, Array, Param

Then = CausalConv | SelectiveScan

#: The parameter whose place the product takes.
TAKES = {CausalConv: "x", SelectiveScan: "step"}
#: Values of a channel's state that a thread has registers for, beside as many rates.
MOST_VALUES = 16
PREFIX = "then_"


def check_then(then: Then, rows: int) -> None:
    """Raise PtxgenError for what cannot follow a product of ``rows`` values."""
    if then.rows != 1 or then.segments or then.channels != rows:
        raise PtxgenError(
            f"gemv: {then.name} of {then.channels} channels, {then.rows} rows in {then.segments} "
            f"segments after a product of {rows} rows: one token of as many channels"
        )
    if isinstance(then, CausalConv) and then.gated:
        raise PtxgenError("gemv: a gated convolution takes more than a product")
    if not has_registers(then):
        raise PtxgenError(f"gemv: states of more than {MOST_VALUES} values after a product")


def has_registers(then: Then) -> bool:
    """Whether a thread can have all of a channel's state."""
    return isinstance(then, CausalConv) or then.size <= MOST_VALUES


def shared_nbytes(then: Then) -> int:
    """Bytes of shared memory for what all channels of a token have in common: b and c."""
    return 0 if isinstance(then, CausalConv) else 8 * then.size


def then_params(then: Then) -> tuple[Param, ...]:
    """Its parameters but the product and y, with `PREFIX` before their names."""
    return tuple(
        replace(p, name=PREFIX + p.name, shape=then.shape_of(p))
        for p in then.params
        if p.name not in (TAKES[type(then)], "y")
    )


def make_then_inputs(then: Then, rng: np.random.Generator) -> dict[str, Any]:
    """Random values for `then_params`."""
    names = {p.name for p in then_params(then) if p.access is not Access.OUT}
    inputs = {PREFIX + name: value for name, value in then.make_inputs(rng).items()}
    return {name: inputs[name] for name in names}


def follow(then: Then, product: Array, inputs: dict[str, Any]) -> dict[str, Array]:
    """y, and what else it writes, from the product (1, channels) and the launch's inputs."""
    own = {
        name.removeprefix(PREFIX): value
        for name, value in inputs.items()
        if name.startswith(PREFIX)
    }
    outputs = then.reference(**own, **{TAKES[type(then)]: product})
    return {"y": outputs.pop("y")} | {PREFIX + name: value for name, value in outputs.items()}
