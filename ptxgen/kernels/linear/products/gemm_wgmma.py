"""Matrix products (GEMM) of many packed activation vectors, on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import ELEMENTWISE, Activated, Bounded, Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.heads import Heads
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.shared_adapted import SharedAdapted
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.packed_parts import Mixture, PackedPart, as_run
from urdir.ptxgen.kernels.linear.products.packed_examples import end_examples, small_examples
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, begun
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.ptx.architecture import SM_REGISTERS
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.packed import GROUP, GROUP_NBYTES, TILE_SLICES

#: Threads of a warpgroup, whose operand A has 64 rows.
WARPGROUP = 128
#: Registers of a thread except those of sums: with this many no type spills.
OTHER_REGISTERS = 52
#: Registers for the weights of a slice beside those of the slice before.
SLICE_REGISTERS = 28
#: Vectors up to which a tile is of few, and the most of a tile: of more than 256 each 16 places
#: take two instructions, and with more than these some types spill.
FEW, MOST = 64, 296
#: The steps after a product whose CTAs take turns, and the rows of an f32 y that a lane stores.
TURN_STEPS = (Bias, Gated, *ELEMENTWISE, Residual, Bounded, PackedVectors, Heads)
LANE_ROWS = 4


@dataclass(frozen=True, slots=True)
class WgmmaCut:
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, ``vectors``
    activation vectors.

    ``row_groups`` * ``splits`` warpgroups multiply. Those of a split take every ``splits``-th tile
    of the columns. The ``cluster`` CTAs of a cluster share the columns, each has a run of tiles.
    Each split has ``weight_stages`` stages of one tile of weights, and ``x_stages`` stages of
    ``x_slices`` slices of activations. ``resident``: CTAs of an SM.

    ``ctas``: this many CTAs take the tiles of y in turns (`can_take_turns`), two row
    groups each, whose stages of weights are their own; 0: each CTA has one tile.
    """

    row_groups: int
    vectors: int
    splits: int = 1
    cluster: int = 1
    weight_stages: int = 3
    x_stages: int = 3
    x_slices: int = 1
    resident: int = 1
    ctas: int = 0

    #: Of 16 rows, that a warp has.
    operands = 1

    def __post_init__(self) -> None:
        if (
            not 1 <= self.row_groups * self.splits <= 4
            or self.vectors % GROUP
            or not GROUP <= self.vectors <= MOST
            or TILE_SLICES % self.x_slices
            or not 1 <= self.cluster <= 8
            or min(self.weight_stages, self.x_stages) < 1
            or (self.ctas and (self.row_groups, self.splits, self.cluster) != (2, 1, 1))
            or (self.ctas and self.weight_stages < self.row_groups)
        ):
            raise PtxgenError(f"impossible cut of a product: {self}")

    @property
    def takes_turns(self) -> bool:
        """Whether a CTA takes several tiles of y, and copies for the next while it ends one."""
        return self.ctas > 0

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.row_groups * self.splits

    @property
    def multipliers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of the CTA: a warpgroup more, which issues copies."""
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def first_registers(self) -> int:
        """Registers with which each thread begins."""
        return min(SM_REGISTERS // (self.threads * self.resident) // 8 * 8, 248)

    @property
    def hands_over(self) -> bool:
        """Whether the warpgroup that copies hands registers to those that multiply: tiles of many
        vectors, where these need more for their sums and the weights of a slice."""
        needed = self.used_registers + SLICE_REGISTERS
        return self.resident == 1 and self.vectors > FEW and needed > self.first_registers

    @property
    def copy_registers(self) -> int:
        """Registers that a thread which copies keeps where it hands over the others: beside four
        warpgroups these need more."""
        return 24 if self.warpgroups == 4 else 40

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies."""
        if not self.hands_over:
            return self.first_registers
        left = self.first_registers * (self.warpgroups + 1) - self.copy_registers
        return min(left // self.warpgroups // 8 * 8, 248)

    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""
        return self.x_slices * self.vectors // GROUP * GROUP_NBYTES

    @property
    def used_registers(self) -> int:
        """Registers that a thread needs, of a warpgroup that multiplies."""
        return self.vectors // 2 + OTHER_REGISTERS

    @property
    def may_overlap(self) -> bool:
        """Whether there are registers for the weights of a slice while the products of the slice
        before run, and another stage of activations than that of these products."""
        has_room = self.used_registers + SLICE_REGISTERS <= self.registers
        return has_room and self.x_stages > 1


@dataclass(frozen=True)
class GemmWgmma(PackedProduct):
    """A `PackedProduct` by `wgmma`: a warpgroup of producers, and some that multiply."""

    cut: WgmmaCut

    prologues = (BegunNorm,)
    epilogues = (*PackedProduct.epilogues[:2], SharedAdapted, *PackedProduct.epilogues[2:])

    def __post_init__(self) -> None:
        super().__post_init__()
        # Each CTA has all vectors; those that compute A x must be on the device at once, of which
        # larger clusters leave SMs unused.
        apart = self.cut.vectors < self.batch or self.cut.cluster > 2
        if self.steps.has(SharedAdapted) and apart:
            raise PtxgenError(f"{self.name}: {self.cut} of a product that computes A x")
        if self.cut.takes_turns and not can_take_turns(self):
            raise PtxgenError(f"{self.name}: {self.cut} of a product that cannot take turns")

    @property
    def overlaps(self) -> bool:
        """Whether the weights of a slice are made while the products of the slice before run. Float
        weights are only loaded, and their activations have few stages: one more in use costs more,
        unless a row group multiplies alone while the other ends a tile.
        """
        floats = any(fmt.is_float for fmt in self.formats)
        return self.cut.may_overlap and (self.cut.takes_turns or not floats)

    @cached_property
    def runs(self) -> tuple[PackedPart, ...]:
        """The matrices, those of one type together; each alone in turns, where it ends by itself,
        and with adapters, which have names of their own."""
        if self.cut.takes_turns or self.steps.has(Adapted):
            return self.parts
        of_types = groupby(self.parts, key=lambda part: part.format)
        return tuple(as_run(tuple(of)) for _, of in of_types)

    @property
    def rows_beside(self) -> int:
        """Row tiles that follow each other with the same vectors, so that the tiles of all CTAs at
        a time have few rows and few vectors. On an H200 the first product of bge-large's FFN takes
        121 us in place of 130."""
        return max(n for n in range(1, 17) if self.tiling.row_ctas % n == 0)

    name = "gemm_wgmma"

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @cached_property
    def memory(self) -> PackedMemory:
        vectors, adapts = self.cut.vectors, self.steps.find(SharedAdapted)
        return PackedMemory(
            *(self.cut, self.parts),
            pairs_nbytes=8 * vectors if self.mixture is not None and not self.packs else 0,
            factors_nbytes=8 + 4 * vectors if self.steps.has(BegunNorm) else 0,
            adapted_nbytes=0 if adapts is None else adapts.table_nbytes(vectors),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        cut = self.cut
        rows, tiles = self.tiling.row_ctas, self.tiling.tiles
        # Tiles beyond the last come last, and those of one expert read their x at a time.
        across, down = (tiles, rows) if self.mixture is None else (rows, tiles)
        if self.cut.takes_turns:
            across, down = cut.ctas, 1
        return LaunchShape(
            grid=(cut.cluster * across, down, 1),
            block=(cut.threads, 1, 1),
            cluster=(cut.cluster, 1, 1),
            shared_bytes=self.grids.end,
            resident=cut.resident,
        )

    @classmethod
    def examples(cls) -> Mapping[str, GemmWgmma]:
        return dict(_examples(cls))


def can_take_turns(product: GemmWgmma) -> bool:
    """Whether CTAs may take turns: y comes from registers, by lanes with four rows each."""
    plain = all(type(step) in TURN_STEPS for step in product.steps) and not product.launch_fields
    lengths = [of.dims for of in product.heads.places] if product.heads else []
    lengths += [part.rows for part in product.parts]
    whole = product.packs or all(length % LANE_ROWS == 0 for length in lengths)
    whole &= product.packs or not product.steps.gated
    floats = all(fmt.is_float for fmt in product.formats)
    return plain and whole and floats and product.mixture is None


def _examples(cls: type[GemmWgmma]) -> Iterator[tuple[str, GemmWgmma]]:
    q8, q4_k, q6_k, f16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))
    small = WgmmaCut(1, 8, weight_stages=2, x_stages=2)
    yield from small_examples(cls, small)
    yield "large tile", cls(q4_k, 200, 512, 201, WgmmaCut(2, 192))
    cut = WgmmaCut(4, 72, weight_stages=1, x_stages=2, x_slices=4)
    yield "tall tile", cls.of(q4_k, 100, 512, 70, cut, Gated(), PackedVectors())
    cut = WgmmaCut(2, 264, weight_stages=2, x_stages=2)
    yield "wide tile", cls.of(q6_k, 130, 512, 521, cut, Residual())
    cut = WgmmaCut(2, 296, weight_stages=2, x_stages=2)
    yield "widest tile", cls.of(q4_k, 70, 512, 291, cut, Gated(), PackedVectors())
    cut = WgmmaCut(4, 120, weight_stages=2, x_stages=2, x_slices=4)
    yield "tall tile of many", cls.of(q4_k, 100, 512, 115, cut, Gated(), PackedVectors())
    yield "splits", cls(q4_k, 130, 1280, 17, WgmmaCut(1, 24, splits=4, x_slices=4, x_stages=1))
    yield "splits of many", cls(q6_k, 70, 1280, 75, WgmmaCut(1, 80, 2, 1, 2, 2, x_slices=4))
    yield "splits of slices", cls(q6_k, 70, 1280, 75, WgmmaCut(1, 40, 2, 1, 2, 3, x_slices=2))
    yield "splits of one slice", cls(q6_k, 70, 1280, 125, WgmmaCut(1, 128, 2, 1, 3, 4))
    cut = WgmmaCut(1, 24, 2, 2, x_slices=4, x_stages=2)
    yield "cluster", cls.of(q6_k, 65, 1280, 20, cut, Residual())
    yield "several residuals", cls.of(q4_k, 70, 512, 75, WgmmaCut(1, 72), Bias(), Residual())
    wide, packed = replace(small, vectors=16), PackedVectors()
    adds = (Residual(), BeginNorm(), packed)
    three = WgmmaCut(1, 40, 1, 3, x_slices=4, x_stages=2)
    yield "cluster of three", cls.of(q6_k, 130, 1280, 37, three, Residual())
    yield "cluster of three begins norm", cls.of(q4_k, 256, 1280, 35, three, *adds)
    yield "begins norm", cls.of(q4_k, 256, 288 * 8, 19, WgmmaCut(2, 24), Bias(), *adds)
    several = WgmmaCut(1, 24, 2, 2, x_slices=4, x_stages=2)
    yield "cluster begins norm", cls.of(q6_k, 512, 1280, 40, several, *adds)
    parts = WgmmaCut(1, 16, 4, 2, 1, 2, x_slices=4)
    yield "few parts begin norm", cls.of(q8, 256, 2304, 13, parts, *adds)
    rms = begun(Norm("rms", 1e-5))
    yield "norm begun", cls.of(q8, 70, 512, 37, replace(small, vectors=24), rms, Bias())
    yield "norm begun, gated", cls.of(q4_k, 96, 768, 30, WgmmaCut(2, 16), rms, Gated(), packed)
    yield "norm begun, three", cls.of(q4_k, 192, 512, 12, wide, rms, others=((q6_k, 33), (f16, 64)))
    yield "one type, three", cls(q4_k, 200, 512, 12, wide, others=((q4_k, 33), (q4_k, 70)))
    two = WgmmaCut(2, 24, 2, 2, x_slices=4, x_stages=2)
    yield "two of one type", cls.of(q4_k, 70, 1280, 20, two, rms, others=((q4_k, 300), (q6_k, 40)))
    floats = ((f16, 100), (f16, 24), (q8, 17))
    yield "two types, two each", cls(q8, 33, 288, 37, replace(small, vectors=24), others=floats)
    own = Adapted(2, 16, places=(0, 1), count=2)
    yield "adapted, norm begun", cls.of(q4_k, 96, 768, 30, WgmmaCut(2, 16), rms, own, Gated())
    yield "adapted, begin norm", cls.of(q8, 256, 512, 13, wide, Adapted(2, 8), *adds)
    mine = SharedAdapted(2, 16, places=(0, 1), count=2, sequences=5, sms=3)
    yield "adapts, norm begun", cls.of(q4_k, 96, 768, 14, WgmmaCut(2, 16), rms, mine, Gated())
    mine = SharedAdapted(3, 8, places=(1, None, 0), count=2, sequences=4)
    both = {"others": ((q6_k, 33), (f16, 64))}
    yield "adapts, three", cls.of(q4_k, 192, 512, 12, wide, mine, **both)
    mine = SharedAdapted(9, 24, sequences=20)
    yield "adapts, cluster", cls.of(q6_k, 65, 1280, 20, several, mine, Residual())
    second = Adapted(2, 8, places=(None, 0))
    yield "adapted, the second", cls.of(q8, 64, 512, 12, wide, second, others=((f16, 40),))
    shared = Adapted(9, 40, "f32")
    yield "adapted, cluster", cls.of(q6_k, 65, 1280, 20, several, shared, Residual())
    yield from end_examples(cls, small, wide, WgmmaCut(2, 16))
    up, limited = Mixture(7, 2, 16), Gated(Activation("swiglu_oai", limit=1.5))
    cut = WgmmaCut(2, 16, weight_stages=2, x_stages=2)
    yield "experts up", cls.of(q4_k, 48, 512, 11, cut, Gated(), packed, mixture=up)
    cut, mixture = WgmmaCut(2, 32, 2, 1, 1, 1, x_slices=4), Mixture(3, 1, 32)
    biased = cls.of(q8, 80, 288, 21, cut, Bias(), limited, packed, mixture=mixture)
    yield "experts up, biases", biased
    relu2, mixture = Activated(Activation("relu2")), Mixture(9, 2, 16)
    yield "experts without gate", cls.of(f16, 32, 70, 5, wide, relu2, packed, mixture=mixture)
    down = cls.of(q6_k, 80, 256, 23, wide, Bias(), Weighted(), mixture=Mixture(5, 2, 16))
    yield "experts down", down
    cut = WgmmaCut(2, 64, 2, 2, 1, 1, x_slices=4)
    split = cls(q8, 144, 1056, 40, cut, mixture=Mixture(3, 2, 64))
    yield "experts down, splits and cluster", split
    each = cls.of(q4_k, 32, 256, 1, wide, Weighted(), mixture=Mixture(12, 4, 16))
    yield "experts with one row each", each
    cut, mixture = WgmmaCut(2, 32, 1, 1, 2, 1, x_slices=4), Mixture(9, 2, 32)
    yield "experts of every width", cls.of(q4_k, 80, 512, 50, cut, Weighted(), mixture=mixture)
    yield from _turn_examples(cls)


def _turn_examples(cls: type[GemmWgmma]) -> Iterator[tuple[str, GemmWgmma]]:
    """Products whose CTAs take tiles of y in turns."""
    f16, bf16, packed = FORMATS["F16"], FORMATS["BF16"], PackedVectors()
    cut = WgmmaCut(2, 24, weight_stages=3, x_stages=2, ctas=3)
    yield "turns", cls.of(f16, 260, 600, 69, cut, Bias(), Residual())
    gelu = Activated(Activation("gelu_erf"))
    yield "turns, packed", cls.of(bf16, 330, 290, 45, cut, Bias(), gelu, packed)
    yield "turns, three", cls.of(f16, 132, 300, 70, cut, Bias(), others=((bf16, 36), (f16, 200)))
    cut = WgmmaCut(2, 40, weight_stages=2, x_stages=2, ctas=2)
    yield "turns, gated", cls.of(bf16, 200, 290, 101, cut, Bias(), Gated(), packed)
