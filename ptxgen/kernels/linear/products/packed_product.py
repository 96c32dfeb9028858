"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.heads import Heads
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.packed_parts import Mixture, PackedCut, PackedPart
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.products.packed_operands import HalfOperands, Operands
from urdir.ptxgen.kernels.linear.products.packed_tiling import PackedTiling
from urdir.ptxgen.kernels.linear.reference import completed, multiply
from urdir.ptxgen.kernels.linear.spec import EPILOGUES
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Prologue, check_steps, stored
from urdir.ptxgen.spec import Access, Array, Param, Tolerance
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import SharedGrids
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.packed import GROUP

#: Bytes of shared memory of the largest SM for its CTAs, each of which costs 1 KB more.
SM_NBYTES, CTA_COST = 228 << 10, 1 << 10


@dataclass(frozen=True)
class PackedProduct(Product):
    """y[b] = W x[b] for packed f16 activations (`packed`), W (rows, cols) repacked, then the
    ``epilogue``.

    Weights are rounded to f16, P times (`Layout.powers`), in registers; products and sums are f32.
    ``others``: (format, rows) of more matrices for the same x, each with its own y. The vectors of
    a ``mixture`` have the matrices of their experts.

    y[b] has the same bits whatever the other vectors are. Sums are taken in an order that ``cols``
    and the ``cut`` decide. Raises PtxgenError for F32 weights, a cut that does not fit, and an odd
    number of row groups of a gated product.
    """

    format: Format
    rows: int
    cols: int
    batch: int
    cut: PackedCut
    prologue: tuple[Prologue, ...] = ()
    epilogue: tuple[Epilogue, ...] = ()
    others: tuple[tuple[Format, int], ...] = ()
    mixture: Mixture | None = None

    #: The numbers that it multiplies.
    operands: ClassVar[Operands] = HalfOperands()
    packs_many = True
    epilogues = (*EPILOGUES, Weighted, BeginNorm, PackedVectors, Heads)

    def __post_init__(self) -> None:
        cut, tiling = self.cut, self.tiling
        if self.batch < 1 or (self.mixture is None and cut.vectors > GROUP * tiling.groups):
            raise PtxgenError(f"{self.name}: {self.batch} vectors in tiles of {cut.vectors}")
        self.operands.check(self)
        if self.mixture is not None:
            self.mixture.check(self)
        if self.steps.gated and cut.row_groups % 2:
            raise PtxgenError(f"{self.name}: gated in pairs of row groups")
        check_steps(self)
        if self.grids.end > SM_NBYTES // cut.resident - CTA_COST:
            raise PtxgenError(f"{self.name}: {cut} takes {self.grids.end} bytes")
        if cut.used_registers > cut.registers:
            raise PtxgenError(f"{self.name}: {cut} leaves too few registers")

    @cached_property
    def heads(self) -> Heads | None:
        """The step that makes heads of y."""
        return self.steps.find(Heads)

    @cached_property
    def packs(self) -> bool:
        """Whether y is packed."""
        return self.steps.has(PackedVectors)

    @property
    def launch_fields(self) -> frozenset[str]:
        """``batch`` if the number of vectors is an argument, ``length``."""
        is_argument = self.heads is not None and not self.heads.whole
        return frozenset({"batch"} if is_argument else ())

    @property
    def pair_shape(self) -> tuple[str | int, ...]:
        return () if self.mixture is None else (self.tiling.products,)

    def bias_shape(self, part: Part) -> tuple[str | int, ...]:
        return (part.rows,) if self.mixture is None else (self.mixture.experts, part.rows)

    @cached_property
    def tiling(self) -> PackedTiling:
        """How y is divided among CTAs."""
        return PackedTiling(
            self.cut,
            ((self.format, self.rows), *self.others),
            *(self.cols, self.batch, self.steps.pair),
            packs=self.packs,
            room=0 if self.heads is None else self.heads.room,
            mixture=self.mixture,
        )

    @property
    def parts(self) -> tuple[PackedPart, ...]:
        return self.tiling.parts

    @property
    def vectors(self) -> int:
        return self.tiling.vectors

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.parts[0].layout

    @property
    def memory(self) -> PackedMemory:
        """Shared memory, except for entries of codebooks."""
        raise NotImplementedError

    @cached_property
    def grids(self) -> SharedGrids:
        """Codebooks whose entries follow."""
        return SharedGrids.of(self.formats, self.memory.nbytes, biased=True)

    @property
    def params(self) -> tuple[Param, ...]:
        """x, what steps take, and of each matrix its weights, what its steps take, and y."""
        params = [Param("length", "u32")] if self.launch_fields else []
        params += self.operands.x_params(self)
        products: str | int = "batch"
        if self.mixture is not None:
            params += self.mixture.params(self.batch, self.packs)
            products = self.tiling.products
        params += [p for step in self.steps for p in step.params(self)]
        for part in self.parts:
            params += self.operands.weight_params(self, part)
            params += [p for step in self.epilogue_of(part) for p in step.part_params(self, part)]
            params.append(Param(f"y{part.suffix}", "f32", (products, part.rows), Access.OUT))
        return stored(self, params)

    @property
    def tolerance(self) -> Tolerance:
        """That of the operands; a y of f16 is rounded once more."""
        is_rounded = self.packs or self.heads is not None
        return Tolerance(rtol=self.operands.error(self) + 2.0**-11 * is_rounded)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        if self.mixture is not None:
            return {"y": self.mixture.reference(self, inputs)}
        x = self.operands.vectors(self, inputs)
        return multiply(self, inputs, x, self.operands.matrices)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"length": np.uint32(self.batch)}
        if self.mixture is not None:
            inputs |= self.mixture.lists(self.batch, rng)
        return completed(self, inputs | self.operands.make_inputs(self, rng), rng)

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.tiling.products * rows * self.cols * self.steps.pair
