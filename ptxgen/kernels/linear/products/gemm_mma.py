"""Matrix products (GEMM) of many packed activation vectors, on tensor cores since sm_80."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.packed_parts import BANDS
from urdir.ptxgen.kernels.linear.products.packed_examples import end_examples, small_examples
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.ptx.architecture import SM_REGISTERS, WARP
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.packed import GROUP, GROUP_NBYTES, TILE_SLICES

#: Registers of a thread except those of sums and operands.
OTHER_REGISTERS = 84


@dataclass(frozen=True, slots=True)
class MmaCut:
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, ``vectors``
    activation vectors.

    A warp multiplies 16 rows of each of ``operands`` row groups with all vectors. The warps of a
    split take every ``splits``-th tile of the columns and do not wait for other splits. Each split
    has ``weight_stages`` stages of one tile of weights, and ``x_stages`` stages of ``x_slices``
    slices of activations. ``resident``: CTAs of an SM.
    """

    row_groups: int
    vectors: int
    splits: int = 1
    operands: int = 1
    weight_stages: int = 2
    x_stages: int = 3
    x_slices: int = 1
    resident: int = 1

    #: CTAs that share the columns; slices of activations for a tile of weights.
    cluster, slices = 1, TILE_SLICES
    takes_turns = False

    def __post_init__(self) -> None:
        if (
            self.row_groups % self.operands
            or self.operands not in (1, 2)
            or not 1 <= self.split_warps * self.splits <= 16
            or self.vectors % GROUP
            or not GROUP <= self.vectors <= 128
            or self.slices % self.x_slices
            or min(self.weight_stages, self.x_stages) < 2
            or self.x_stages - 1 > (self.weight_stages - 1) * self.steps
        ):
            raise PtxgenError(f"impossible cut of a product: {self}")

    @property
    def steps(self) -> int:
        """Stages of activations for a tile of weights."""
        return self.slices // self.x_slices

    @property
    def split_warps(self) -> int:
        """Warps of a split."""
        return BANDS * self.row_groups // self.operands

    @property
    def split_threads(self) -> int:
        """Threads of a split."""
        return WARP * self.split_warps

    @property
    def multipliers(self) -> int:
        """Threads that multiply: all of the CTA."""
        return self.split_threads * self.splits

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return min(SM_REGISTERS // (self.multipliers * self.resident) // 8 * 8, 255)

    @property
    def used_registers(self) -> int:
        """Registers that a thread needs: sums, operands and others."""
        return self.operands * (self.vectors // 2 + 16) + OTHER_REGISTERS

    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""
        return self.x_slices * self.vectors // GROUP * GROUP_NBYTES


@dataclass(frozen=True)
class GemmMma(PackedProduct):
    """A `PackedProduct` without ``mixture`` by ``mma.sync``: every warp copies and multiplies."""

    cut: MmaCut

    #: Whether it multiplies numbers of eight bits.
    of_bytes = False
    name = "gemm_mma"

    @property
    def targets(self) -> tuple[str, ...]:
        return since(80)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixture is not None or self.steps.has(BeginNorm):
            raise PtxgenError(f"{self.name}: not for mixtures, and no begin_norm")

    @cached_property
    def memory(self) -> PackedMemory:
        return PackedMemory(self.cut, self.parts, barriers=0)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.tiling.tiles, self.tiling.row_ctas, 1),
            block=(self.cut.multipliers, 1, 1),
            shared_bytes=self.grids.end,
            resident=self.cut.resident,
            prefers_shared=self.cut.resident > 1,
        )

    @classmethod
    def examples(cls) -> Mapping[str, GemmMma]:
        return dict(_examples(cls))


def _examples(cls: type[GemmMma]) -> Iterator[tuple[str, GemmMma]]:
    q4_0, q4_k = FORMATS["Q4_0"], FORMATS["Q4_K"]
    small = MmaCut(1, 8)
    yield from small_examples(cls, small)
    yield "large tile", cls(q4_k, 200, 512, 71, MmaCut(2, 64, operands=2))
    yield "two operands", cls.of(q4_k, 250, 768, 17, MmaCut(4, 16, 1, 2, 2, 2, 2), Bias())
    yield "splits", cls(q4_k, 130, 1280, 17, MmaCut(1, 24, 2, x_stages=2, x_slices=4))
    yield "more splits than tiles", cls.of(q4_0, 65, 288, 9, MmaCut(1, 8, 3), Residual())
    yield from end_examples(cls, small, replace(small, vectors=16), MmaCut(2, 16, operands=2))
