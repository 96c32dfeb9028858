"""What products with the matrices of experts have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.row_experts import RowExperts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.shared import shared_layout, shared_params
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Prologue, Step
from urdir.ptxgen.spec import Access, Param
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout, random_weights


@dataclass(frozen=True)
class ExpertsProduct(Product):
    """Products of ``batch`` rows with ``used`` of ``experts`` matrices (rows, cols) each, between
    the steps of a ``prologue`` and an ``epilogue``. Biases are (experts, rows). Rows have the
    experts of `RowExperts` by the ``selection`` and the ``logit_parts``. The matrices may be
    ``held`` by a cache. ``has_shared``: the last of the ``used`` slots has one more expert, which
    all rows have, with matrices of its own.

    Raises PtxgenError for matrices whose rows are not whole bands of tiles.
    """

    format: Format
    experts: int
    used: int
    rows: int
    cols: int
    batch: int
    prologue: tuple[Prologue, ...] = field(default=(), kw_only=True)
    epilogue: tuple[Epilogue, ...] = field(default=(), kw_only=True)
    selection: Selection | None = field(default=None, kw_only=True)
    logit_parts: LogitParts | None = field(default=None, kw_only=True)
    held: Held | None = field(default=None, kw_only=True)
    has_shared: bool = field(default=False, kw_only=True)

    @cached_property
    def layout(self) -> Layout:
        """How the matrices of all experts lie in memory: as one."""
        if self.experts < 1 or self.rows < 1 or self.rows % TILE_ROWS:
            raise PtxgenError(
                f"{self.name}: {self.experts} experts of {self.rows} rows: at least one, of a "
                f"multiple of {TILE_ROWS} rows"
            )
        return Layout(self.format, self.experts * self.rows, self.cols)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(0, self.layout, 0, 1),)

    @cached_property
    def row_experts(self) -> RowExperts:
        """Which experts the rows have."""
        sizes = (self.batch, self.experts, self.used)
        return RowExperts(*sizes, self.selection, self.logit_parts, self.has_shared)

    @property
    def pair_shape(self) -> tuple[str | int, ...]:
        return ("batch", "used")

    def bias_shape(self, part: Part) -> tuple[str | int, ...]:
        return ("experts", "rows")

    @property
    def matrices(self) -> tuple[str, ...]:
        """The parameters of the matrices that are multiplied together."""
        return ("weights", "up")[: self.steps.pair]

    @property
    def bands(self) -> int:
        """Bands of tiles of an expert."""
        return self.rows // TILE_ROWS

    @property
    def pairs(self) -> int:
        """Pairs of rows and slots."""
        return self.batch * self.used

    @property
    def weight_params(self) -> tuple[Param, ...]:
        """The matrices."""
        if self.held is not None:
            return self.held.params(self)
        nbytes = (self.layout.nbytes,)
        params = (Param(name, "u8", nbytes, Access.IN) for name in self.matrices)
        return *params, *(shared_params(self) if self.has_shared else ())

    def params_of(self, *kinds: type[Step]) -> tuple[Param, ...]:
        """The parameters of the steps of these kinds, in their order."""
        steps = [step for kind in kinds if (step := self.steps.find(kind)) is not None]
        (part,) = self.parts
        return tuple(p for s in steps for p in (*s.params(self), *s.part_params(self, part)))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Small weights, so that activations are curved at the sums."""
        inputs = {} if self.held is None else self.held.make_inputs(self, rng)
        given = [p for p in self.params if p.access is not Access.OUT]
        for p in given:
            if p.dtype == "u8" and p.name not in inputs:
                layout = shared_layout(self) if p.name.startswith("shared_") else self.layout
                inputs[p.name] = random_weights(layout, rng, 0.5 / self.cols**0.5)
        inputs |= self.row_experts.make_inputs(rng)
        for p in given:
            if p.name not in inputs:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return {p.name: inputs[p.name] for p in given}

    def flops(self) -> int:
        return 2 * self.pairs * self.rows * self.cols * self.steps.pair


def check_experts(of: ExpertsProduct) -> None:
    """Raise PtxgenError for a selection, or a cache, of others, and for a shared expert that the
    kernel does not take."""
    of.row_experts.check(of.name)
    if of.has_shared and (of.held is not None or of.steps.has(Bias)):
        raise PtxgenError(f"{of.name}: an expert that all rows have has no bias and no cache")
    if of.held is not None:
        of.held.check(of)
