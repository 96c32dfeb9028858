"""What products with the matrices of experts have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.parts import TAKEN, LogitParts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Prologue, Step
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.spec import Access, Param
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout, random_weights


@dataclass(frozen=True)
class ExpertsProduct(Product):
    """Products of ``batch`` rows with ``used`` of ``experts`` matrices (rows, cols) each, between
    the steps of a ``prologue`` and an ``epilogue``. Biases are (experts, rows). Rows read their
    experts from ``expert`` (batch, used) u32 on the device, or choose them by a plain ``selection``
    from ``logits`` (batch, experts) f32, each warp for itself; one row from their ``logit_parts``.
    The matrices may be ``held`` by a cache.

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

    @property
    def bias(self) -> bool:
        """Whether the product has a bias."""
        return self.steps.has(Bias)

    @property
    def weighted(self) -> bool:
        """Whether the product is multiplied with the weight of its pair."""
        return self.steps.has(Weighted)

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
        return tuple(Param(name, "u8", nbytes, Access.IN) for name in self.matrices)

    @property
    def choice_params(self) -> tuple[Param, ...]:
        """Parameters by which a row has its experts, and of several rows their ``position``: those
        with `IDLE` are padding, and have none."""
        if self.logit_parts is not None:
            return self.logit_parts.params(self.experts)
        chosen = Param("expert", "u32", ("batch", "used"), Access.IN)
        if self.selection is not None:
            chosen = Param("logits", "f32", ("batch", "experts"), Access.IN)
        position = Param("position", "u32", ("batch",), Access.IN)
        return (chosen, position) if self.batch > 1 else (chosen,)

    def params_of(self, *kinds: type[Step]) -> tuple[Param, ...]:
        """The parameters of the steps of these kinds, in their order."""
        steps = [step for kind in kinds if (step := self.steps.find(kind)) is not None]
        (part,) = self.parts
        return tuple(p for s in steps for p in (*s.params(self), *s.part_params(self, part)))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Small weights, so that activations are curved at the sums; most rows choose some experts,
        and no row some others."""
        inputs = {} if self.held is None else self.held.make_inputs(self, rng)
        if self.logit_parts is not None:
            inputs |= self.logit_parts.make_inputs(self.experts, rng)
        elif self.selection is not None:
            inputs |= self.selection.random_logits(self.batch, rng)
        for p in self.params:
            if p.access is Access.OUT or p.name in inputs:
                continue
            if p.dtype == "u8":
                inputs[p.name] = random_weights(self.layout, rng, 0.5 / self.cols**0.5)
            elif p.name == "position":
                inputs[p.name] = np.arange(self.batch, dtype=np.uint32)
            elif p.name == "expert":
                inputs[p.name] = random_choice(rng, self.batch, self.experts, self.used)
            else:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def flops(self) -> int:
        return 2 * self.pairs * self.rows * self.cols * self.steps.pair


def check_choice(of: ExpertsProduct) -> None:
    """Raise PtxgenError for a selection, or a cache, of others."""
    by, sizes = of.selection, (of.experts, of.used)
    if by is not None and (by.experts, by.used) != sizes:
        raise PtxgenError(f"{of.name}: {of.used} of {of.experts} experts, not {by}")
    if by is not None and not by.is_plain:
        raise PtxgenError(f"{of.name}: a warp does not choose by {by}")
    if of.logit_parts is not None and (by is None or of.batch > 1 or of.experts not in TAKEN):
        raise PtxgenError(
            f"{of.name}: parts of logits are for one row that chooses among {TAKEN} experts"
        )
    if of.held is not None:
        of.held.check(of)
