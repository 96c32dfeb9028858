"""The first matrices of the experts that a few rows chose, and the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.column_orders import ORDER, in_orders
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
    """y[b, s] = W x[b], ``by_pair`` W x[b, s], then the steps, with the matrix W of the expert that
    row b has in slot s; `Gated` is f(W x) * (U x).

    With a ``selection`` x is that of its router, too: it is read before the wait, unless logits
    come in parts, from the launch that makes x.

    Results of padding rows are left as they are.

    ``ordered``: columns of an expert's matrices are those of x in its ``order``; numbers of columns
    beyond x are of zeros.

    ``in_turn``: there is no ``expert``, row b has number b % experts: heads with matrices of their
    own.
    """

    in_turn: bool = False
    ordered: bool = False

    prologues = (Normed,)
    epilogues = (Weighted, Bias, Gated, Activated)
    name = "experts_up"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

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
            *(ORDER if self.ordered else ()),
            Param("x", "f32", ("batch", *("used",) * self.by_pair, "cols"), Access.IN),
            *self.params_of(Normed, Bias),
            Param("y", "f32", ("batch", "used", "rows"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        of = Reference(self, self.parts[0], inputs, {})
        x = multiplied(inputs["x"], of).reshape(self.batch, -1, self.cols)
        turns = np.arange(self.batch)[:, None] % self.experts
        experts = turns if self.in_turn else self.row_experts.chosen(inputs)["expert"]
        places, matrices, held = found(self, inputs, experts)
        x = in_orders(x, experts, inputs)
        products = [np.einsum("bsrc,bsc->bsr", m[places], x) for m in matrices]
        y = np.stack([product.reshape(-1, self.rows) for product in products])
        y = y if self.steps.gated else y[0]
        y = ended(self, y, experts.reshape(-1), np.arange(self.pairs), inputs, self.epilogue)
        return {"y": y.astype(np.float32).reshape(self.batch, self.used, self.rows), **held}

    @classmethod
    def examples(cls) -> dict[str, ExpertsUp]:
        return up_examples(cls)


def _check(of: ExpertsUp) -> None:
    """Raise PtxgenError for experts in turn, chosen here, or with orders, with what these do not
    have."""
    if of.ordered and (of.selection is None or of.logit_parts is not None or of.has_shared):
        raise PtxgenError("experts_up: x is brought into orders after a choice by logits alone")
    if of.ordered and of.cols % 32:
        raise PtxgenError(f"experts_up: orders of {of.cols} columns: a multiple of 32")
    if of.in_turn and (of.used > 1 or of.steps.has(Weighted) or of.held):
        raise PtxgenError("experts_up: experts in turn are one a row, without weights or slots")
    if of.selection is not None and (of.in_turn or of.steps.has(Weighted)):
        raise PtxgenError("experts_up: experts in turn, and weighted input, are not chosen here")
