"""Products of many rows with their experts, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.examples import gemm_examples
from urdir.ptxgen.kernels.experts.reference import ended, matrices_of
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.products.gemm_tile import CtaTile, widest
from urdir.ptxgen.kernels.linear.steps import check_steps
from urdir.ptxgen.kernels.pairs import grouped, most_tiles, random_choice
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.format import Format
from urdir.ptxgen.weights.layout import random_weights

#: What may follow the products of the first matrices of experts, and those of the last ones.
UP, DOWN = (Weighted, Bias, Gated, Activated), (Bias, Weighted)
#: CTAs that fill a big GPU (132 SMs), two on most SMs: tiles are smaller if there are fewer CTAs.
FULL = 256
#: The tiles to choose from; the first ones use an unpacked weight and a loaded value most often.
TILES = (
    CtaTile(128, 128, 1, 2),
    CtaTile(64, 128, 1, 2),
    CtaTile(64, 64, 2, 2),
    CtaTile(32, 64, 2, 1, depth=2),
    CtaTile(32, 32, 4, 1, depth=2),
    CtaTile(16, 64, 2, 1, depth=4),
    CtaTile(16, 32, 4, 1, depth=4),
)
#: The most bytes of a plane that a thread has registers for with the first of them.
MAX_RAW_LARGEST = 32
#: Pairs of a tile, smallest first.
HEIGHTS = tuple(sorted({tile.batch for tile in TILES}))


def tiles_of(fmt: Format) -> Sequence[CtaTile]:
    """Tiles of matrices of a type."""
    return TILES if widest(fmt) <= MAX_RAW_LARGEST else TILES[1:]


def tile_height(rows: int, experts: int, used: int, formats: Iterable[Format] = ()) -> int:
    """Pairs of a tile of `GroupExperts`: the lowest tile that holds an expert's share of all pairs
    with a margin of a quarter, else the highest; of those that matrices of all ``formats`` have."""
    pairs, heights = rows * used, set(HEIGHTS)
    for fmt in formats:
        heights &= {tile.batch for tile in tiles_of(fmt)}
    share = 5 * ceil_div(pairs, min(experts, pairs)) // 4
    return min((height for height in heights if height >= share), default=max(heights))


@dataclass(frozen=True)
class ExpertsGemm(ExpertsProduct):
    """y = W x for pairs of rows and experts, then the ``epilogue``, W (rows, cols) of the pair's
    expert.

    ``pair`` and ``tile_of`` are those of `GroupExperts` for ``batch`` rows, with tiles of
    ``height``. Going up, x (batch, cols) has the rows' activations, and y (pairs, rows) is in the
    order of ``pair``. ``down``: x (pairs, cols) is in the order of ``pair``, y (pairs, rows) in
    that of rows and slots, and the epilogue is `DOWN`, else `UP`. Weights and activations are
    rounded as in `Gemm`.
    """

    height: int
    down: bool = False
    tile: CtaTile | None = None

    epilogues = UP
    name = "experts_gemm"
    template = ("urdir.templates", "experts/gemm.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.experts or self.batch < 1:
            raise PtxgenError(
                f"experts_gemm: {self.used} of {self.experts} experts for {self.batch} rows"
            )
        if self.selection is not None:
            raise PtxgenError("experts_gemm: pairs are listed, so experts have been chosen before")
        _ = self.layout  # refuses odd shapes
        check_steps(self, DOWN if self.down else UP)
        if self.cut.n_tiles % self.steps.pair:
            raise PtxgenError(f"experts_gemm: {self.cut} is too narrow for a gate")
        if self.height not in HEIGHTS or self.cut.batch != self.height:
            raise PtxgenError(f"experts_gemm: tiles of {self.height} pairs: one of {HEIGHTS}")
        if 4 * self.pairs * self.cols >= 2**32:
            raise PtxgenError(f"experts_gemm: {self.pairs} x {self.cols} activations exceed 4 GiB")
        if self.grid_rows > 65535:
            raise PtxgenError(f"experts_gemm: {self.rows} rows are more than 65535 tiles")

    @property
    def tiles(self) -> int:
        """Tiles of pairs, at most."""
        return most_tiles(self.batch, self.experts, self.used, self.height)

    @property
    def x_rows(self) -> int:
        """Rows of x."""
        return self.pairs if self.down else self.batch

    @cached_property
    def cut(self) -> CtaTile:
        """What a CTA computes: the widest tile that still gives enough CTAs."""
        if self.tile is not None:
            return self.tile
        tiles, pair = tiles_of(self.format), self.steps.pair
        fitting = [t for t in tiles if t.batch == self.height and t.n_tiles % pair == 0]
        full = (t for t in fitting if self.tiles * ceil_div(pair * self.rows, t.rows) >= FULL)
        return next(full, fitting[-1] if fitting else TILES[-1])

    @property
    def cta_rows(self) -> int:
        """Rows of y of a CTA."""
        return self.cut.rows // self.steps.pair

    @property
    def grid_rows(self) -> int:
        """CTAs along the rows of an expert."""
        return ceil_div(self.rows, self.cta_rows)

    @property
    def pair_shape(self) -> tuple[str | int, ...]:
        return ("pairs",)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.weight_params,
            Param("pair", "u32", ("pairs",), Access.IN),
            Param("tile_of", "u32", ("tiles", 4), Access.IN),
            Param("x", "f32", ("x_rows", "cols"), Access.IN),
            *self.params_of(Weighted, Bias),
            Param("y", "f32", ("pairs", "rows"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.tiles, self.grid_rows, 1), block=(self.cut.threads, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """As `Gemm`'s; twice as much where a weight may be several times another one, and twice as
        much where an activation joins the errors of two products, or bounds the largest values but
        not the errors."""
        doubts = self.steps.has(Weighted) + (self.steps.f is not None)
        return Tolerance(rtol=1e-3 * 2**doubts)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, pairs = inputs["x"].astype(np.float64), inputs["pair"].astype(np.int64)
        source = np.arange(self.pairs) if self.down else pairs // self.used
        matrices, experts = matrices_of(self, inputs), np.zeros(self.pairs, np.int64)
        products = np.zeros((self.steps.pair, self.pairs, self.rows))
        for expert, first, count, _ in inputs["tile_of"].tolist():
            places = slice(first, first + count)
            experts[places] = expert
            for number, matrix in enumerate(matrices):
                products[number, places] = x[source[places]] @ matrix[expert].T
        made = products if self.steps.gated else products[0]
        made = ended(self, made, experts, pairs, inputs, self.epilogue)
        y = np.empty((self.pairs, self.rows), np.float32)
        y[pairs if self.down else slice(None)] = made
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        # Small weights keep sums where the activation is curved.
        scale = 1.0 if self.steps.f is None else 0.5 / self.cols**0.5
        choice = random_choice(rng, self.batch, self.experts, self.used)
        inputs: dict[str, Any] = grouped(choice, self.experts, self.height)
        for name in self.matrices:
            inputs[name] = random_weights(self.layout, rng, scale)
        for p in self.params:
            if p.access is Access.IN and p.name not in inputs:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsGemm]:
        return gemm_examples(cls)

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        return super().bytes_moved() - self.steps.pair * self.layout.powers_nbytes
