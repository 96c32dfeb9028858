"""Matrix products (GEMM) of many activation vectors of signed bytes, by ``mma.sync``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_bytes import GemmBytes
from urdir.ptxgen.kernels.linear.products.gemm_mma import GemmMma, MmaCut
from urdir.ptxgen.kernels.linear.products.packed_operands import ByteOperands, E4m3Operands
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True, slots=True)
class MmaBytesCut(MmaCut):
    """As `MmaCut`, of activations of eight bits: a slice has twice as many places."""

    slices = eights.TILE_SLICES


@dataclass(frozen=True)
class GemmMmaBytes(GemmMma):
    """As `GemmBytes`, by ``mma.sync``."""

    cut: MmaBytesCut

    operands: ClassVar[ByteOperands | E4m3Operands] = ByteOperands()
    of_bytes = True
    name = "gemm_mma_bytes"
    template = GemmMma.template
    epilogues = GemmBytes.epilogues

    @classmethod
    def examples(cls) -> Mapping[str, GemmMmaBytes]:
        return dict(_examples(cls))


def _examples(cls: type[GemmMmaBytes]) -> Iterator[tuple[str, GemmMmaBytes]]:
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    small, paired = MmaBytesCut(1, 8), MmaBytesCut(2, 16, operands=2)
    yield "smallest", cls(q8, 8, 32, 1, small)
    for i, fmt in enumerate(f for f in FORMATS.values() if eights.can_be_bytes(f)):
        cols = max(fmt.block, 288 // fmt.block * fmt.block)
        yield fmt.name, cls.of(fmt, 70, cols, 3 + i % 6, small, *[Bias()] * (i % 2 == 0))
    yield "large tile", cls(q4_k, 200, 768, 75, MmaBytesCut(2, 64, operands=2))
    yield "splits", cls.of(q4_k, 130, 1280, 17, MmaBytesCut(1, 24, 2, x_stages=2), Residual())
    yield "gated", cls.of(q4_k, 96, 512, 30, paired, Bias(), Gated(), PackedVectors())
    yield "three matrices", cls(q4_k, 192, 256, 12, paired, others=((q6_k, 33), (q8, 64)))
    some = Adapted(2, 8, places=(0, 1), count=2)
    yield "adapted", cls.of(q4_k, 96, 512, 30, paired, some, Gated())
