"""How products of packed activation vectors are divided: among CTAs, and in their shared memory."""

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
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.packed_parts import (
    BANDS,
    GROUP_ROWS,
    Mixture,
    PackedCut,
    PackedPart,
    takes_packed,
)
from urdir.ptxgen.kernels.linear.product import EPILOGUES, MainLoop
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Prologue, find
from urdir.ptxgen.spec import Access, Param, ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import ENTRIES, aligned, with_entries
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import GROUP, packed_shape

#: Bytes of shared memory of the largest SM for its CTAs, each of which costs 1 KB more.
SM_NBYTES, CTA_COST = 228 << 10, 1 << 10
#: CTAs of a grid along y.
MAX_GRID = 65535


@dataclass(frozen=True)
class PackedTiling(MainLoop):
    """The fields of a `PackedProduct`, and its sizes."""

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
            self._check_mixture(self.mixture)
        if self.gated and cut.row_groups % 2:
            raise PtxgenError(f"{self.name}: gated in pairs of row groups")
        self.check_steps()
        if self.shared_bytes > SM_NBYTES // cut.resident - CTA_COST:
            raise PtxgenError(f"{self.name}: {cut} takes {self.shared_bytes} bytes")
        if cut.used_registers > cut.registers:
            raise PtxgenError(f"{self.name}: {cut} leaves too few registers")

    def _check_mixture(self, mixture: Mixture) -> None:
        if mixture.height != self.cut.vectors:
            raise PtxgenError(f"{self.name}: tiles of {mixture.height} vectors, {self.cut}")
        if self.has(Residual) or self.others or not 1 <= mixture.used <= mixture.experts:
            raise PtxgenError(f"{self.name}: {mixture} without residual and other matrices")
        if self.rows % TILE_ROWS:
            raise PtxgenError(
                f"{self.name}: {self.rows} rows of an expert: a multiple of {TILE_ROWS}"
            )
        if self.tiles > MAX_GRID:
            raise PtxgenError(f"{self.name}: {self.tiles} tiles are more than {MAX_GRID}")

    @cached_property
    def heads(self) -> Heads | None:
        """The step that makes heads of y."""
        return self.find(Heads)

    @cached_property
    def packs(self) -> bool:
        """Whether y is packed."""
        return self.has(PackedVectors)

    def has_bias(self, part: Part) -> bool:
        """Whether the product of one of the matrices has a bias."""
        return find(self.epilogue_of(part), Bias) is not None

    @property
    def takes_length(self) -> bool:
        """Whether the number of vectors is an argument."""
        return self.heads is not None and not self.heads.whole

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"batch"} if self.takes_length else ())

    @property
    def pair_shape(self) -> tuple[str, ...]:
        return () if self.mixture is None else ("products",)

    def bias_shape(self, part: Part) -> tuple[str | int, ...]:
        return (part.rows,) if self.mixture is None else (self.mixture.experts, part.rows)

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

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.products * rows * self.cols * self.pair

    def completed(self, inputs: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Inputs by name in the order of parameters, with random floats for those that ``inputs``
        lacks, and what the steps make."""
        for p in self.params:
            if p.name not in inputs and p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        for step in self.fused:
            inputs |= step.make_inputs(self, rng)
        return {p.name: inputs[p.name] for p in self.params if p.access is not Access.OUT}

    # ---- parameters ----

    def x_params(self) -> list[Param]:
        """What the launch reads of its vectors."""
        raise NotImplementedError

    def weight_params(self, part: PackedPart) -> list[Param]:
        """What it reads of a part's matrices."""
        raise NotImplementedError

    @property
    def params(self) -> tuple[Param, ...]:
        params = self.x_params() + [p for step in self.fused for p in step.params(self)]
        for part in self.parts:
            params += self.weight_params(part)
            params += [p for step in self.epilogue_of(part) for p in step.part_params(self, part)]
            params.append(Param(f"y{part.suffix}", "f32", ("products", part.rows), Access.OUT))
        for step in self.fused:
            params = [step.stored(p, self) for p in params]
        return tuple(params)

    # ---- tiles ----

    @property
    def tiles(self) -> int:
        """Tiles of vectors."""
        if self.mixture is not None:
            return self.mixture.tiles(self.batch)
        if self.heads is not None:
            return ceil_div(self.batch, self.cut.vectors)
        return ceil_div(self.groups * GROUP, self.cut.vectors)

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.parts[0].layout

    @property
    def cta_rows(self) -> int:
        """Rows of y of a CTA."""
        return GROUP_ROWS * self.cut.row_groups // self.pair

    @property
    def takes_turns(self) -> bool:
        """Whether a CTA makes several tiles of y."""
        return False

    @property
    def has_neighbours(self) -> bool:
        """Whether a warp has neighbouring rows (`PackedPart`)."""
        return False

    @cached_property
    def parts(self) -> tuple[PackedPart, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        parts: list[PackedPart] = []
        for number, (fmt, rows) in enumerate(((self.format, self.rows), *self.others)):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            ctas = self._row_tiles(rows)
            experts = 1 if self.mixture is None else self.mixture.experts
            layout = Layout(fmt, experts * rows, self.cols)
            parts.append(PackedPart(number, layout, first, ctas, experts, self.has_neighbours))
        return tuple(parts)

    @property
    def row_ctas(self) -> int:
        """CTAs along the rows of all matrices."""
        return self.parts[-1].first_cta + self.parts[-1].ctas

    def _row_tiles(self, rows: int) -> int:
        """CTAs along the rows of a matrix. A packed y has whole tiles of 256 columns."""
        if self.packs:
            return ceil_div(packed_shape(1, rows)[0] * GROUP_ROWS, self.cta_rows)
        # Of 128 rows, 64 are every other band of 16, the first ones or the others.
        blocks, bands = divmod(ceil_div(rows, TILE_ROWS), 2 * BANDS)
        return ceil_div(GROUP_ROWS * (2 * blocks + min(bands, 2)), self.cta_rows)

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return ceil_div(self.vectors, GROUP)

    @property
    def slices(self) -> int:
        """Slices of x."""
        return packed_shape(1, self.cols)[0]

    @property
    def row_tiles(self) -> int:
        """Tiles of a row of weights."""
        return self.layout.row_tiles

    @property
    def reads_once(self) -> bool:
        """Whether a weight is read by one CTA."""
        return self.mixture is None and not self.heads and self.tiles == 1

    @property
    def x_in_one(self) -> bool:
        """Whether slices of x that follow each other are one run for a CTA: it has all vectors."""
        return self.mixture is None and self.groups * GROUP == self.cut.vectors

    # ---- shared memory ----

    @property
    def memory(self) -> PackedMemory:
        """Shared memory, except for entries of codebooks."""
        raise NotImplementedError

    #: Whether values of codes are biased.
    biased_grids, grid_entries = True, ENTRIES

    @property
    def shared_grids(self) -> tuple[Format, ...]:
        """The types with codebooks, whose entries are in shared memory."""
        return tuple(fmt for fmt in self.formats if fmt.grid)

    @property
    def grids_at(self) -> int:
        """Where these entries begin."""
        return aligned(self.memory.nbytes)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        return with_entries(self.memory.nbytes, self.shared_grids)
