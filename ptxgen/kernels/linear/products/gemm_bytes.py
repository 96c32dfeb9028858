"""Matrix products (GEMM) of many activation vectors of signed bytes, on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import WARPGROUP
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.products.packed_operands import ByteOperands, E4m3Operands
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.spec import EPILOGUES
from urdir.ptxgen.ptx.architecture import SM_REGISTERS
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.packed import GROUP

#: Registers of a thread except those of sums and of bytes of weights, and those that a thread which
#: copies keeps where it hands over the others.
OTHER_REGISTERS, COPY_REGISTERS = 40, 40
#: The most vectors of a tile: of more than 256 each 32 places take two instructions, and with more
#: than these some types spill.
MOST = 288


@dataclass(frozen=True, slots=True)
class BytesCut:
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, a warpgroup each, and
    ``vectors`` activation vectors.

    It has ``weight_stages`` stages of a tile of weights, and ``x_stages`` stages of a slice of
    activations, of which each of the ``sharers`` CTAs of a cluster copies a part for all of them.
    Or the ``cluster`` CTAs of one have a run of the columns each. With two ``sets`` of registers,
    bytes of weights are made while wgmma reads the ones before.
    """

    row_groups: int
    vectors: int
    weight_stages: int = 3
    x_stages: int = 4
    sharers: int = 1
    sets: int = 1
    cluster: int = 1

    splits = operands = resident = 1
    takes_turns = False

    def __post_init__(self) -> None:
        if (
            not 1 <= self.row_groups <= 2
            or self.vectors % GROUP
            or not GROUP <= self.vectors <= MOST
            or not 1 <= self.sharers <= 8
            or GROUP * self.vectors % self.sharers
            or min(self.weight_stages, self.x_stages) < 1
            or self.sets not in (1, 2)
            or not 1 <= self.cluster <= 8
            or min(self.cluster, self.sharers) > 1
        ):
            raise PtxgenError(f"impossible cut of a product: {self}")

    @property
    def multipliers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.row_groups

    @property
    def threads(self) -> int:
        """Threads of the CTA: two warps more, which issue copies, or a warpgroup, which hands over
        its registers, too."""
        return self.multipliers + (WARPGROUP if self.hands_over else 64)

    @property
    def first_registers(self) -> int:
        """Registers with which each thread begins: each quarter of an SM has a quarter of them, and
        of the warps."""
        return min(SM_REGISTERS // (WARPGROUP * (self.row_groups + 1)) // 8 * 8, 248)

    @property
    def hands_over(self) -> bool:
        """Whether the warps that copy hand registers to those that multiply, which need more."""
        return self.used_registers > self.first_registers

    @property
    def copy_registers(self) -> int:
        """Registers of a thread that copies."""
        return COPY_REGISTERS if self.hands_over else self.first_registers

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies."""
        left = self.first_registers * (self.row_groups + 1) - self.copy_registers
        return min(left // self.row_groups // 8 * 8, 248)

    @property
    def used_registers(self) -> int:
        """Registers that a thread needs, of a warpgroup that multiplies."""
        return self.vectors // 2 + 16 * self.sets + OTHER_REGISTERS

    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""
        return eights.SLICE * self.vectors


@dataclass(frozen=True)
class GemmBytes(PackedProduct):
    """y[b] = W x[b] of signed bytes (`eights`), W (rows, cols) repacked, then the ``epilogue``.

    Weights become bytes in registers. Sums are s32, over all columns; they are multiplied with the
    scales of row and vector. ``others``: (format, rows) of more matrices for the same x, each with
    its own scales and its own y.

    y[b] has the same bits whatever the other vectors are. Raises PtxgenError for weights and steps
    that it does not take, and a cut that does not fit.
    """

    cut: BytesCut

    operands: ClassVar[ByteOperands | E4m3Operands] = ByteOperands()
    name = "gemm_bytes"
    epilogues = (*EPILOGUES, PackedVectors)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixture is not None:
            raise PtxgenError(f"{self.name}: no mixtures")
        vectors = self.cut.vectors
        if vectors >= 4 * GROUP and vectors % (2 * GROUP) and not self.operands.are_floats:
            raise PtxgenError(f"{self.name}: {vectors} vectors: instructions take bytes by 16")
        ctas = self.launch_shape.grid[1]
        if ctas % self.cut.sharers or self.cut.cluster > self.layout.row_tiles:
            raise PtxgenError(
                f"{self.name}: {ctas} tiles of rows, {self.layout.row_tiles} of columns in "
                f"clusters of {self.cut}"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @cached_property
    def memory(self) -> PackedMemory:
        return PackedMemory(self.cut, self.parts)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.cut.cluster * self.tiling.tiles, self.tiling.row_ctas, 1),
            block=(self.cut.threads, 1, 1),
            cluster=(self.cut.cluster, self.cut.sharers, 1),
            shared_bytes=self.grids.end,
            resident=1,
        )

    @classmethod
    def examples(cls) -> Mapping[str, GemmBytes]:
        return dict(_examples(cls))


def _examples(cls: type[GemmBytes]) -> Iterator[tuple[str, GemmBytes]]:
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    small = BytesCut(1, 8, 2, 2)
    yield "smallest", cls(q8, 8, 32, 1, small)
    for i, fmt in enumerate(f for f in FORMATS.values() if eights.can_be_bytes(f)):
        cols = max(fmt.block, 288 // fmt.block * fmt.block)
        yield fmt.name, cls.of(fmt, 70, cols, 3 + i % 6, small, *[Bias()] * (i % 2 == 0))
    yield "large tile", cls(q4_k, 200, 768, 300, BytesCut(2, 192, 2, 4, sets=2))
    yield "widest tile", cls.of(q4_k, 70, 768, 291, BytesCut(2, 288, 2, 3, sets=2), Residual())
    paired = BytesCut(2, 16)
    yield "gated", cls.of(q4_k, 96, 512, 30, paired, Bias(), Gated())
    yield "packed", cls.of(q4_k, 96, 512, 30, paired, Gated(), PackedVectors())
    yield (
        "adapted",
        cls.of(q4_k, 96, 512, 30, paired, Adapted(2, 8, places=(0, 1), count=2), Gated()),
    )
    yield "three matrices", cls(q4_k, 192, 256, 12, paired, others=((q6_k, 33), (q8, 64)))
    yield "residual", cls.of(q6_k, 65, 1280, 20, replace(small, vectors=24), Residual(0.5))
    gelu = Activation("gelu")
    ends = (Bias(), Activated(gelu), Scaled(0.05), Bounded(softcap=20.0))
    yield "ends", cls.of(q8, 64, 256, 8, small, *ends)
    ahead = BytesCut(1, 32, 2, 2, sets=2)
    yield "two sets", cls(q6_k, 70, 1280, 40, ahead, others=((q8, 40),))
    yield "cluster", cls.of(q4_k, 70, 1280, 40, BytesCut(1, 32, 2, 2, cluster=2), Residual())
    gated = BytesCut(2, 16, 2, 2, sets=2, cluster=3)
    yield "cluster, packed", cls.of(q6_k, 64, 768, 17, gated, Gated(), PackedVectors())
    shared = BytesCut(1, 32, 2, 3, sharers=2)
    yield "shared activations", cls(q4_k, 250, 1280, 75, shared)
    both = cls.of(q6_k, 128, 512, 40, BytesCut(2, 32, 2, 2, sharers=2, sets=2), Gated())
    yield "shared activations, gated", both
    parts = cls(q4_k, 128, 768, 64, BytesCut(2, 32, 1, 2, sharers=2), others=((q6_k, 100),))
    yield "shared activations, two matrices", parts
