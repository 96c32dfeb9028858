"""The sum of the ranks' vectors, on every rank: each writes its own into the memory of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.exchange.spec import Exchange
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class AllReduce(Exchange):
    """The sum of the ranks' vectors (n,), added in the order of the ranks; plus a ``residual``.

    All ranks get the same bits. One shot: made for the few values of a decode step.
    """

    residual: bool = False

    name = "all_reduce"
    template = ("urdir.templates", "all_reduce.ptx.j2")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "f32", ("n",), Access.IN),
            *((Param("residual", "f32", ("n",), Access.IN),) if self.residual else ()),
            Param("y", "f32", ("n",), Access.OUT),
            *self.exchange_params,
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance.of_sum("f32", terms=self.ranks + self.residual)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values, left = self.exchanged(inputs)
        total: Array = np.stack(values).astype(np.float64).sum(axis=0)
        if self.residual:
            total = total + inputs["residual"]
        return {"y": total.astype(np.float32), **left}

    @classmethod
    def examples(cls) -> Mapping[str, AllReduce]:
        return {
            "two ranks": cls(n=67, ranks=2, rank=0, capacity=256),
            "the last of four": cls(n=515, ranks=4, rank=3, capacity=1024, residual=True),
            "between": cls(n=1, ranks=3, rank=1, capacity=512),
        }

    def flops(self) -> int:
        return self.n * (self.ranks - 1 + self.residual)
