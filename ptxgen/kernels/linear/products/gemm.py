"""Matrix products (GEMM) of many activation vectors with repacked weights, on tensor cores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_tile import TILE
from urdir.ptxgen.kernels.linear.spec import EPILOGUES, LinearSpec, odd_cols, side_by_side
from urdir.ptxgen.kernels.linear.steps import Part
from urdir.ptxgen.spec import LaunchShape, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, UNIT


@dataclass(frozen=True)
class Gemm(LinearSpec):
    """Matrix product y[b] = W x[b] on tensor cores, W (rows, cols) of any type, repacked, then the
    steps of the ``epilogue``.

    It serves many rows where no product of packed activations does (`packed_choice.packs`): on
    sm_75, with F32 weights, and with F16 and BF16 where a CTA has 99 KB of shared memory (sm_86,
    sm_89, sm_120).

    Weights (unpacked in f32) and activations are rounded to f16, products and sums are f32. Values
    above 65504 become infinite. Those below 6e-5 become multiples of 6e-8, an error of at most
    3e-8, negligible for weights and activations of usual size. Therefore BF16 weights are
    rounded to f16, too: bf16 products would round the activations to 8 bits.
    y[b] has the same bits whatever the rest of the batch is.
    """

    batch: int = 1

    #: What a CTA computes.
    cut = TILE
    most_batch = sys.maxsize
    prologues = ()
    epilogues = tuple(kind for kind in EPILOGUES if kind not in (Gated, Residual))
    name = "gemm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.others:
            raise PtxgenError("gemm: takes one matrix")
        if ceil_div(self.layout.rows, self.cut.rows) > 65535:
            raise PtxgenError(f"gemm: {self.rows} rows are more than 65535 tiles")
        if 4 * self.batch * self.cols >= 2**32:
            raise PtxgenError(f"gemm: {self.batch} x {self.cols} activations exceed 4 GiB")

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return side_by_side(self.layouts, [self.cut.rows])

    @property
    def launch_shape(self) -> LaunchShape:
        tile = self.cut
        grid = (ceil_div(self.batch, tile.batch), ceil_div(self.rows, tile.rows), 1)
        return LaunchShape(grid=grid, block=(tile.threads, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Rounding of both operands to f16, 2^-11 each at most: a sum of n products of independent
        errors is off by about 2^-12 of its own standard deviation, of which max|y| is 2 to 4.
        """
        return Tolerance(rtol=1e-3)

    @classmethod
    def examples(cls) -> dict[str, Gemm]:
        return dict(_examples(cls))


def _examples(cls: type[Gemm]) -> Iterator[tuple[str, Gemm]]:
    q8, q4_k, f16, f32 = (FORMATS[name] for name in ("Q8_0", "Q4_K", "F16", "F32"))
    yield "few rows", cls(q8, 8, UNIT, batch=9)
    for i, fmt in enumerate(FORMATS.values()):
        bias = [Bias()] * (i % 2 == 0)
        yield fmt.name, cls.of(fmt, 33, odd_cols(fmt), *bias, batch=9 + i)
    yield "tiles", cls(q4_k, 130, 256, batch=129)
    yield "F16 odd", cls.of(f16, 31, 70, Bias(), batch=20)
    yield "adapted", cls.of(q8, 33, 96, Bias(), Adapted(2, 8), batch=17)
    yield "gelu", cls.of(q8, 34, 96, Bias(), Activated(Activation("gelu")), batch=17)
    yield "silu", cls.of(f16, 33, 64, Activated(Activation("silu")), Scaled(0.5), batch=9)
    yield "capped", cls.of(q8, 40, 64, Scaled(0.25), Bounded(20.0, 16.0), batch=10)
    yield "F32 aligned", cls(f32, 130, 132, batch=64)
