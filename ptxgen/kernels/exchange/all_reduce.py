"""One-shot all-reduce: the sum of the ranks' vectors, each written to the memory of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.spec import Exchange
from urdir.ptxgen.kernels.summary import SUMMARY, summary
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class AllReduce(Exchange):
    """The sum of the ranks' vectors (n,), added in the order of the ranks; plus a ``residual``.

    All ranks get the same bits. One-shot: for the few values of a decode step. If the sum consists
    of rows of ``cols`` values (0: none), a multiple of 32, the kernel also begins the following
    norm, as `GemmSmall` does. ``given``: the kernel that made x has already sent it to the others
    (`Gives`).
    """

    residual: bool = False
    cols: int = 0
    given: bool = False

    name = "all_reduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cols and (self.cols % 32 or self.n % self.cols):
            raise PtxgenError(
                f"all_reduce: {self.n} values as rows of {self.cols}: whole rows of a multiple of "
                "32 values"
            )

    @property
    def rows(self) -> int:
        """Rows whose norm is begun."""
        return self.n // self.cols if self.cols else 0

    @property
    def params(self) -> tuple[Param, ...]:
        groups = (2, "rows", self.cols // SUMMARY)
        return Param.given(
            Param("x", "f32", ("n",), Access.IN),
            self.residual and Param("residual", "f32", ("n",), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
            self.cols and Param("next_norm", "f32", ("cols",), Access.IN),
            self.cols and Param("scaled", "f32", ("rows", "cols"), Access.OUT),
            self.cols and Param("y_summary", "f32", groups, Access.OUT),
            *self.exchange_params,
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance.of_sum("f32", terms=self.ranks + self.residual + SUMMARY)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values, left = self.exchanged(inputs)
        total: Array = np.stack(values).astype(np.float64).sum(axis=0)
        if self.residual:
            total = total + inputs["residual"]
        y = total.astype(np.float32)
        if self.cols:
            rows = y.reshape(self.rows, self.cols)
            scaled = rows * inputs["next_norm"]
            left |= {"scaled": scaled, "y_summary": summary(scaled, rows)}
        return {"y": y, **left}

    @classmethod
    def examples(cls) -> dict[str, AllReduce]:
        return {
            "two ranks": cls(n=67, ranks=2, rank=0, capacity=256),
            "the last of four": cls(n=515, ranks=4, rank=3, capacity=1024, residual=True),
            "between": cls(n=1, ranks=3, rank=1, capacity=512),
            "begins a norm": cls(480, 2, 1, capacity=512, residual=True, cols=96),
            "given": cls(n=300, ranks=3, rank=1, capacity=512, residual=True, given=True),
        }

    def flops(self) -> int:
        return self.n * (self.ranks - 1 + self.residual + 4 * bool(self.cols))
