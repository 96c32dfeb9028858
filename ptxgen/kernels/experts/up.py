"""The first matrices of the experts that a few rows chose, and the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.examples import up_examples
from urdir.ptxgen.kernels.experts.reference import ended, found
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.reference import multiplied
from urdir.ptxgen.kernels.linear.steps import Reference
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class ExpertsUp(ExpertsSpec):
    """y[b, s] = W x[b], then the steps, with the matrix W of the expert that row b has in slot s;
    `Gated` is f(W x) * (U x).

    With a ``selection`` x is that of its router, too: it is read before the wait, unless logits
    come in parts, from the launch that makes x.

    Results of padding rows are left as they are.

    ``in_turn``: there is no ``expert``, row b has number b % experts: heads with matrices of their
    own.
    """

    in_turn: bool = False

    prologues = (Normed,)
    epilogues = (Weighted, Bias, Gated, Activated)
    name = "experts_up"
    template = ("urdir.templates", "experts/up.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_turn and (self.used > 1 or self.steps.has(Weighted) or self.held):
            raise PtxgenError("experts_up: experts in turn are one a row, without weights or slots")
        if self.selection is not None and (self.in_turn or self.steps.has(Weighted)):
            raise PtxgenError(
                "experts_up: experts in turn, and weighted input, are not chosen here"
            )

    @property
    def tiles_left(self) -> int:
        """All of them where one row chooses by logits: the next launch, which chooses as well, does
        so meanwhile. A step of qwen3-30b-a3b on an H200 takes 949 us so, else 966 (2026-11-29)."""
        chooses = self.batch == 1 and self.selection is not None and self.logit_parts is None
        rows = self.cut.rows
        every = self.cut.columns.warp_blocks * rows.tiles * rows.passes * self.steps.pair
        return every if chooses else super().tiles_left

    @property
    def grid_rows(self) -> int:
        return self.batch * self.used

    @property
    def blocks(self) -> int:
        return self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.weight_params,
            *(() if self.in_turn else self.row_experts.params),
            *self.params_of(Weighted),
            Param("x", "f32", ("batch", "cols"), Access.IN),
            *self.params_of(Normed, Bias),
            Param("y", "f32", ("batch", "used", "rows"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = multiplied(inputs["x"], Reference(self, self.parts[0], inputs, {}))
        experts = np.arange(self.batch)[:, None] % self.experts
        if not self.in_turn:
            experts = self.row_experts.chosen(inputs)["expert"]
        places, matrices, held = found(self, inputs, experts)
        products = [np.einsum("bsrc,bc->bsr", m[places], x) for m in matrices]
        y = np.stack([product.reshape(-1, self.rows) for product in products])
        y = y if self.steps.gated else y[0]
        y = ended(self, y, experts.reshape(-1), np.arange(self.pairs), inputs, self.epilogue)
        return {"y": y.astype(np.float32).reshape(self.batch, self.used, self.rows), **held}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsUp]:
        return up_examples(cls)
