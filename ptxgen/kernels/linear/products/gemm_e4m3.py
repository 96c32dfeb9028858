"""Matrix products (GEMM) of many activation vectors of floats of eight bits, on Hopper's tensor
cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_bytes import BytesCut, GemmBytes
from urdir.ptxgen.kernels.linear.products.packed_operands import BlockOperands, E4m3Operands
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class GemmE4m3(GemmBytes):
    """As `GemmBytes`, of weights that are E4M3 numbers with a scale a row, multiplied as they are,
    and activations that are (`PackBytes`). Sums are f32, over all columns: see
    `E4m3Operands`."""

    operands = E4m3Operands()
    name = "gemm_e4m3"

    @classmethod
    def examples(cls) -> Mapping[str, GemmE4m3]:
        return dict(_examples(cls))


@dataclass(frozen=True)
class GemmE4m3Blocks(GemmBytes):
    """As `GemmE4m3`, where weights and activations have a scale for each 128 columns of a row
    (`BlockOperands`): the sums of each are added to f32 sums, times both scales."""

    operands = BlockOperands()
    name = "gemm_e4m3_blocks"

    @property
    def keeps_rows_alike(self) -> bool:
        """So that their scales are, where they are of 128 rows as well; not with adapters, whose
        lanes add to one row of each."""
        return self.steps.gated and not self.steps.has(Adapted)

    @classmethod
    def examples(cls) -> Mapping[str, GemmE4m3Blocks]:
        return dict(_block_examples(cls))


def _examples(cls: type[GemmE4m3]) -> Iterator[tuple[str, GemmE4m3]]:
    fmt = FORMATS["E4M3R256"]
    small, paired = BytesCut(1, 8, 2, 2), BytesCut(2, 16)
    yield "smallest", cls(fmt, 8, 256, 1, small)
    yield "bias", cls.of(fmt, 70, 512, 5, small, Bias())
    yield "large tile", cls(fmt, 200, 768, 300, BytesCut(2, 192, 2, 4, sets=2))
    yield "gated", cls.of(fmt, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "two matrices", cls(fmt, 192, 256, 12, paired, others=((fmt, 33),))
    yield "cluster", cls.of(fmt, 70, 1280, 40, BytesCut(1, 32, 2, 2, cluster=2), Residual())
    yield "shared activations", cls(fmt, 250, 1280, 75, BytesCut(1, 32, 2, 3, sharers=2))


def _block_examples(cls: type[GemmE4m3Blocks]) -> Iterator[tuple[str, GemmE4m3Blocks]]:
    fmt = FORMATS["E4M3G128"]
    small, paired = BytesCut(1, 8, 2, 2, passes=1), BytesCut(2, 16, passes=2)
    yield "smallest", cls(fmt, 8, 128, 1, small)
    yield "bias", cls.of(fmt, 70, 640, 5, small, Bias())
    two = BytesCut(2, 192, 2, 3, sets=2, passes=2)
    yield "large tile", cls(fmt, 200, 768, 300, two)
    yield "gated", cls.of(fmt, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "two matrices", cls(fmt, 192, 384, 12, paired, others=((fmt, 33),))
    yield (
        "cluster",
        cls.of(fmt, 70, 1280, 40, BytesCut(1, 32, 2, 2, cluster=2, passes=1), Residual()),
    )
    shared = BytesCut(1, 32, 2, 3, sharers=2, sets=2, passes=4)
    yield "shared activations", cls(fmt, 250, 1280, 75, shared)
    own = Adapted(2, 8, places=(0, 1), count=2)
    yield "adapted", cls.of(fmt, 96, 512, 30, paired, own, Gated())
