"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.heads import Heads
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.packed_parts import (
    BANDS,
    GROUP_ROWS,
    Mixture,
    PackedCut,
    PackedPart,
    takes_packed,
)
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.reference import completed, multiply
from urdir.ptxgen.kernels.linear.spec import EPILOGUES
from urdir.ptxgen.kernels.linear.steps import (
    Epilogue,
    Part,
    Product,
    Prologue,
    check_steps,
    find,
    stored,
)
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import SharedGrids
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout, random_weights
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack

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

    packs_many = True
    epilogues = (*EPILOGUES, Weighted, BeginNorm, PackedVectors, Heads)

    def __post_init__(self) -> None:
        cut = self.cut
        if self.batch < 1 or (self.mixture is None and cut.vectors > GROUP * self.groups):
            raise PtxgenError(f"{self.name}: {self.batch} vectors in tiles of {cut.vectors}")
        if not takes_packed(self.formats):
            raise PtxgenError(f"{self.name}: not for F32 weights")
        if self.mixture is not None:
            self.mixture.check(self)
        if self.steps.gated and cut.row_groups % 2:
            raise PtxgenError(f"{self.name}: gated in pairs of row groups")
        check_steps(self)
        if self.shared_bytes > SM_NBYTES // cut.resident - CTA_COST:
            raise PtxgenError(f"{self.name}: {cut} takes {self.shared_bytes} bytes")
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
    def takes_length(self) -> bool:
        """Whether the number of vectors is an argument."""
        return self.heads is not None and not self.heads.whole

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"batch"} if self.takes_length else ())

    def has_bias(self, part: Part) -> bool:
        """Whether the product of one of the matrices has a bias."""
        return find(self.epilogue_of(part), Bias) is not None

    @property
    def pair_shape(self) -> tuple[str, ...]:
        return () if self.mixture is None else ("products",)

    def bias_shape(self, part: Part) -> tuple[str | int, ...]:
        return (part.rows,) if self.mixture is None else (self.mixture.experts, part.rows)

    # ---- how y is divided among CTAs: parts side by side, tiles of vectors ----

    @property
    def vectors(self) -> int:
        """Vectors of x: places of the list of a mixture, what heads have room for."""
        if self.heads is not None:
            return self.heads.room
        return self.batch if self.mixture is None else self.mixture.places(self.batch)

    @property
    def products(self) -> int:
        """Vectors that are multiplied with a matrix each: a mixture's pairs."""
        return self.batch * (1 if self.mixture is None else self.mixture.used)

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return ceil_div(self.vectors, GROUP)

    @property
    def tiles(self) -> int:
        """Tiles of vectors."""
        if self.mixture is not None:
            return self.mixture.tiles(self.batch)
        return ceil_div(self.batch if self.heads else self.groups * GROUP, self.cut.vectors)

    @property
    def x_in_one(self) -> bool:
        """Whether slices of x that follow each other are one run for a CTA: it has all vectors."""
        return self.mixture is None and self.groups * GROUP == self.cut.vectors

    @property
    def cta_rows(self) -> int:
        """Rows of y of a CTA."""
        return GROUP_ROWS * self.cut.row_groups // self.steps.pair

    @cached_property
    def parts(self) -> tuple[PackedPart, ...]:
        # Warps that store y themselves in the order of rows have neighbouring ones, 32 bytes of
        # each vector at least. On an H200 three matrices of 1,024 x 1,024, 8,192 vectors, take
        # 155 us with 16 bytes.
        neighbours = self.cut.takes_turns and not self.packs
        experts = 1 if self.mixture is None else self.mixture.experts
        parts: list[PackedPart] = []
        for number, (fmt, rows) in enumerate(((self.format, self.rows), *self.others)):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            layout = Layout(fmt, experts * rows, self.cols)
            ctas = ceil_div(self._padded(rows), self.cta_rows)
            parts.append(PackedPart(number, layout, first, ctas, experts, neighbours))
        return tuple(parts)

    def _padded(self, rows: int) -> int:
        """Rows of a matrix for the CTAs: a packed y has whole tiles of 256 columns. Of 128 rows, 64
        are every other band of 16, the first ones or the others."""
        if self.packs:
            return GROUP_ROWS * packed_shape(1, rows)[0]
        blocks, bands = divmod(ceil_div(rows, TILE_ROWS), 2 * BANDS)
        return GROUP_ROWS * (2 * blocks + min(bands, 2))

    @property
    def row_ctas(self) -> int:
        """CTAs along the rows of all matrices."""
        return self.parts[-1].first_cta + self.parts[-1].ctas

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.parts[0].layout

    # ---- shared memory ----

    @property
    def memory(self) -> PackedMemory:
        """Shared memory, except for entries of codebooks."""
        raise NotImplementedError

    @property
    def grids(self) -> SharedGrids:
        """Codebooks whose entries follow."""
        return SharedGrids.of(self.formats, self.memory.nbytes, biased=True)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.grids.end

    # ---- parameters and reference ----

    @property
    def params(self) -> tuple[Param, ...]:
        """x, what steps take, and of each matrix its weights, what its steps take, and y."""
        params = self.x_params() + [p for step in self.steps for p in step.params(self)]
        for part in self.parts:
            params += self.weight_params(part)
            params += [p for step in self.epilogue_of(part) for p in step.part_params(self, part)]
            params.append(Param(f"y{part.suffix}", "f32", ("products", part.rows), Access.OUT))
        return stored(self, params)

    def x_params(self) -> list[Param]:
        """What the launch reads of its vectors."""
        params = [Param("length", "u32")] if self.takes_length else []
        params.append(Param("x", "f16", packed_shape(self.vectors, self.cols), Access.IN))
        return params if self.mixture is None else params + self.mixture.params(self.packs)

    def weight_params(self, part: PackedPart) -> list[Param]:
        """What it reads of a part's matrices."""
        names = self.weights_of(part)
        return [Param(name, "u8", (part.layout.nbytes,), Access.IN) for name in names]

    @property
    def tolerance(self) -> Tolerance:
        """Each rounding to f16 changes a number by up to 2^-11 of itself, and a weight may outweigh
        all others: it is rounded, and so are its scale and its minimum, if they are products; with
        a minimum, both are larger than the weight. A y of f16 is rounded once more, the error of a
        gate and of its other factor add up."""
        roundings = max(Halves(fmt).roundings for fmt in self.formats)
        ends = self.packs or self.heads is not None
        return Tolerance(rtol=2.0**-11 * (self.steps.pair * roundings + ends) + 1e-5)

    def multiplied(
        self, inputs: dict[str, Any], outputs: dict[str, Array], part: Part | None = None
    ) -> Array:
        x = unpack(inputs["x"], self.vectors, self.cols)
        return super().multiplied({**inputs, "x": x}, outputs, part)[: self.batch]

    def reference(self, **inputs: Any) -> dict[str, Array]:
        if self.mixture is not None:
            return {"y": self.mixture.reference(self, inputs)}
        return multiply(self, inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        # What is bounded is as large as its bound, and its errors as large as the sums.
        scale = 0.5 / self.cols**0.5 if self.steps.f is not None and self.steps.f.limit else 1.0
        inputs: dict[str, Any] = {"length": np.uint32(self.batch)}
        if self.mixture is not None:
            inputs |= self.mixture.lists(self.batch, rng)
        inputs["x"] = pack(rng.standard_normal((self.vectors, self.cols)))
        for part in self.parts:
            for name in self.weights_of(part):
                inputs[name] = random_weights(part.layout, rng, scale)
        return completed(self, inputs, rng)

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.products * rows * self.cols * self.steps.pair
