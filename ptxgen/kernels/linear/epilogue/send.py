"""Products that are one rank's addend and are sent to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.gives import Gives
from urdir.ptxgen.kernels.linear.prologue.sum import RankAdd
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Array, Param


@dataclass(frozen=True, slots=True)
class Send(Epilogue):
    """y is also written into the inboxes of the other ranks."""

    gives: Gives

    stem = "send"

    @property
    def text(self) -> str:
        return f"sent from rank {self.gives.rank} to the others' inboxes"

    def check(self, product: Product) -> None:
        if product.others:
            raise PtxgenError(f"{product.name}: send is for the product of one matrix, not several")
        if product.steps.has(RankAdd):
            raise PtxgenError(f"{product.name}: a product takes from other ranks, or sends to them")
        self.gives.check(product.name, product.rows)

    def params(self, product: Product) -> tuple[Param, ...]:
        return self.gives.params

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        return self.gives.make_inputs(rng)

    def bytes_moved(self, product: Product) -> int:
        return self.gives.bytes_moved(product.rows)

    def apply(self, y: Array, of: Reference) -> Array:
        of.outputs.update(self.gives.reference(y.astype(np.float32).reshape(-1), dict(of.inputs)))
        return y
