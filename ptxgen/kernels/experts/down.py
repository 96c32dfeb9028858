"""The last matrices of the experts that a few rows chose, weighted and added to the residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.experts.examples import down_examples
from urdir.ptxgen.kernels.experts.reference import ended, found
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class ExpertsDown(ExpertsSpec):
    """y[b] = sum over slots s of D x[b, s] after `Bias` and `Weighted`, D of the expert that row b
    has there; then `Residual`, which is all of a padding row.

    The experts' matrices stand side by side: one product with ``used`` times ``cols`` columns.
    ``early``: the experts were chosen before the launch before this one, which waited for that. The
    first weights are then loaded while that launch runs. ``starts_next``: the launch after this one
    may start before it waits. A shared expert's weight is the sigmoid of ``gate``.
    """

    early: bool = False
    starts_next: bool = False

    epilogues = (Bias, Weighted, Residual)
    name = "experts_down"
    template = ("urdir.templates", "experts/down.ptx.j2")

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether activations are loaded before weights."""
        return not self.early

    @property
    def grid_rows(self) -> int:
        return self.batch

    @property
    def blocks(self) -> int:
        return self.used * self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.weight_params,
            *self.row_experts.params,
            *(self.params_of(Weighted) if self.selection is None else ()),
            *((Param("gate", "f32", ("batch",), Access.IN),) if self.has_shared else ()),
            Param("x", "f32", ("batch", "used", "cols"), Access.IN),
            *self.params_of(Bias, Residual),
            Param("y", "f32", ("batch", "rows"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs = self.row_experts.chosen(inputs)
        experts = inputs["expert"]
        places, (weights,), held = found(self, inputs, experts)
        y = np.einsum("bsrc,bsc->bsr", weights[places], inputs["x"].astype(np.float64))
        flat, pairs = experts.reshape(-1), np.arange(self.pairs)
        of_slots = [step for step in self.epilogue if not isinstance(step, Residual)]
        y = ended(self, y.reshape(-1, self.rows), flat, pairs, inputs, of_slots)
        y = y.reshape(self.batch, self.used, self.rows).sum(axis=1)
        after = [step for step in self.epilogue if isinstance(step, Residual)]
        return {"y": ended(self, y, flat, pairs, inputs, after).astype(np.float32), **held}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsDown]:
        return down_examples(cls)
