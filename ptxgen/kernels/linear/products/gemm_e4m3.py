"""Matrix products (GEMM) of many activation vectors of floats of eight bits, on Hopper's tensor
cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_bytes import BytesCut, GemmBytes
from urdir.ptxgen.kernels.linear.products.packed_operands import E4m3Operands
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class GemmE4m3(GemmBytes):
    """As `GemmBytes`, of weights that are E4M3 numbers with a scale a row or for each 128 columns,
    multiplied as they are, and activations that are (`PackBytes`). Sums are f32, over all columns:
    see `E4m3Operands`.

    With scales of columns a sum is in units of the latest one: before the next 128 columns it is
    multiplied with the ratio of the two, as by Horner's rule, so that it needs no second register.
    """

    operands = E4m3Operands(of_slices=True)
    name = "gemm_e4m3"
    template = GemmBytes.template

    @classmethod
    def examples(cls) -> dict[str, GemmE4m3]:
        return dict(_examples(cls))


def _examples(cls: type[GemmE4m3]) -> Iterator[tuple[str, GemmE4m3]]:
    fmt, blocks = FORMATS["E4M3R256"], FORMATS["E4M3G128"]
    small, paired = BytesCut(1, 8, 2, 2), BytesCut(2, 16)
    yield "smallest", cls(fmt, 8, 256, 1, small)
    yield "bias", cls.of(fmt, 70, 512, 5, small, Bias())
    yield "large tile", cls(fmt, 200, 768, 300, BytesCut(2, 192, 2, 4, sets=2))
    yield "wide tile", cls.of(fmt, 130, 512, 530, BytesCut(2, 264, 2, 3, sets=2), Residual())
    yield "gated", cls.of(fmt, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "two matrices", cls(fmt, 192, 256, 12, paired, others=((fmt, 33),))
    yield "cluster", cls.of(fmt, 70, 1280, 40, BytesCut(1, 32, 2, 2, cluster=2), Residual())
    yield "shared activations", cls(fmt, 250, 1280, 75, BytesCut(1, 40, 2, 3, sharers=2))
    yield "a block", cls(blocks, 70, 128, 13, small)
    yield "blocks", cls.of(blocks, 70, 640, 5, small, Bias())
    yield "blocks, large tile", cls(blocks, 200, 768, 300, BytesCut(2, 192, 2, 4, sets=2))
    packed = cls.of(blocks, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "blocks, gated", packed
    yield "blocks and rows", cls(blocks, 192, 256, 12, paired, others=((fmt, 33), (blocks, 70)))
    shared = BytesCut(2, 48, 2, 3, sharers=2, sets=2)
    yield "blocks, shared activations", cls(blocks, 250, 640, 75, shared)
    cluster = BytesCut(1, 32, 2, 2, sets=2, cluster=2)
    yield "blocks, cluster", cls.of(blocks, 70, 1408, 40, cluster, Residual())
