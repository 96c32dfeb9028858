"""Matrix products (GEMM) of 1 to 8 vectors, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.cut import Cut, CutOptions
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.products.gemm_small_cut import Lanes, small_cut
from urdir.ptxgen.kernels.linear.products.gemm_small_examples import gemm_small_examples
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, LinearSpec
from urdir.ptxgen.spec import Tolerance
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.format import UNIT, Format
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed_few import Order


@dataclass(frozen=True)
class GemmSmall(TiledSpec):
    """1 to 8 activation vectors times weights, on tensor cores.

    With quantised weights activations (after ``norm``) are rounded to 16-bit multiples of the
    largest in each 256 columns, relative error 3e-5. Products are exact, and so are the sums of a
    row's 256 columns if the type's group scales are integers; other sums are f32. y[b] has the same
    bits in every batch, whatever the other vectors are.

    With a `PackedInput` sums are f32, and weights are rounded to f16 as in `PackedProduct`, unless
    their quants `stay_whole` or `factors_are_exact`.

    BF16 and F16 weights are multiplied as they are, with activations that are each the sum of two
    such numbers: of 16 bits, or of 22 (from 0.001 to 1,048,064).

    ``starts_next``: the next launch may start before this one waits.

    Raises PtxgenError for other batches, for F32 weights, for floats beside quantised weights, for
    rows of floats that are no whole units, and for norms that subtract the mean or add a bias; of
    packed vectors, for a norm that has not begun, and for float weights.
    """

    options: CutOptions = field(default_factory=lambda: CutOptions(resident=1))
    batch: int = MAX_BATCH
    starts_next: bool = False

    #: Before sm_90 no launch starts early, and the registers are needed.
    resident = 1
    prologues = (PackedInput, BegunNorm, Normed)
    epilogues = (*LinearSpec.epilogues, BeginNorm, PackedOutput)
    name = "gemm_small"

    def __post_init__(self) -> None:
        if not takes(self.formats, self.cols):
            names = ", ".join(fmt.name for fmt in self.formats)
            raise PtxgenError(
                "gemm_small: the weights must be quantised, or BF16 and F16 of multiples of "
                f"{UNIT} columns: {names}, {self.cols} columns"
            )
        if self.steps.has(PackedInput) and self.format.is_float:
            raise PtxgenError("gemm_small: packed_input is for quantised weights")
        norm = self.steps.norm
        if norm is not None and not norm.is_factor:
            raise PtxgenError(f"gemm_small: {norm} must be a launch of its own")
        if norm is not None and (self.steps.has(PackedInput) or self.steps.has(BegunNorm)):
            raise PtxgenError("gemm_small: packed_input and begun_norm go without a norm")
        super().__post_init__()

    @property
    def targets(self) -> tuple[str, ...]:
        since_80 = (self.steps.has(PackedInput) or self.multiplies_floats) and self.cluster == 1
        return since(80) if since_80 else super().targets

    @property
    def multiplies_floats(self) -> bool:
        """Whether the weights or quants are floats."""
        return self.format.arithmetic != "integers"

    @property
    def order(self) -> Order:
        """That of packed x: the first matrix decides."""
        return Halves(self.format).order

    @cached_property
    def lanes(self) -> Lanes:
        """Vectors of a lane: up to four vectors have two columns each, of high and of low bytes;
        more have one, and so have packed ones, and those for float weights."""
        few = self.batch <= MAX_BATCH // 2
        both_bytes = few and not self.steps.has(PackedInput) and not self.multiplies_floats
        return Lanes(1 if both_bytes else 2, self.batch)

    @cached_property
    def cut(self) -> Cut:
        return small_cut(self.options, self.layouts, self.steps.pair, self.lanes, self.prologue)

    @property
    def tolerance(self) -> Tolerance:
        """Activations are rounded to multiples of the largest of 256 / 32639. The largest is about
        3.0 if they are standard normal, 5.0 if they are products of two such (with ``norm``). The
        RMS error, 1 / sqrt(12) of a multiple, is 3e-5 or 5e-5 of them. The worst of many products
        is off by as much of the largest product, of few by three times that. Gated, the relative
        errors of both factors add up. Packed ones: see `PackedProduct`. With float weights each is
        rounded to 16 bits of its own, with E4M3 quants to f16, by up to 2^-11. Quants that stay
        whole are subnormal: tensor cores align products by exponents and drop bits below 2^-24 of
        the largest, of which such a quant has up to ten leading zeros. An activation that is many
        times the others (a first token's) leaves that much: 1.3e-5 was measured on an H200.
        """
        packing = 2.0**-11 * self.steps.has(PackedOutput)
        if self.steps.has(PackedInput):
            made = [Halves(fmt) for fmt in self.formats]
            exact = [of.stay_whole or of.factors_are_exact for of in made]
            roundings = max(0 if e else of.roundings for e, of in zip(exact, made, strict=True))
            return Tolerance(rtol=2.0**-11 * roundings + packing + 2.0**-14)
        if self.multiplies_floats:
            least = 2e-5 if self.format.is_float else 2.0**-11
            return Tolerance(rtol=least * self.steps.pair + packing)
        return Tolerance(rtol=(3e-4 if self.steps.f else 1.5e-4) + packing, atol=5e-4)

    @classmethod
    def examples(cls) -> dict[str, GemmSmall]:
        return gemm_small_examples(cls)


def takes(formats: Iterable[Format], cols: int) -> bool:
    """Whether `GemmSmall` has matrices of these types, with ``cols`` columns, in one launch."""
    kinds = {fmt.arithmetic for fmt in formats}
    if kinds == {"integers"}:
        return True
    return len(kinds) == 1 and cols % UNIT == 0 and all(fmt.element != "f32" for fmt in formats)
