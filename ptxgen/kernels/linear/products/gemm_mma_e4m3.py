"""Matrix products (GEMM) of many activation vectors of floats of eight bits, by ``mma.sync``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_mma_bytes import GemmMmaBytes, MmaBytesCut
from urdir.ptxgen.kernels.linear.products.packed_operands import E4m3Operands
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class GemmMmaE4m3(GemmMmaBytes):
    """As `GemmE4m3`, by ``mma.sync``."""

    operands = E4m3Operands()
    name = "gemm_mma_e4m3"
    template = GemmMmaBytes.template

    @property
    def targets(self) -> tuple[str, ...]:
        return since(89)

    @classmethod
    def examples(cls) -> dict[str, GemmMmaE4m3]:
        return dict(_examples(cls))


def _examples(cls: type[GemmMmaE4m3]) -> Iterator[tuple[str, GemmMmaE4m3]]:
    fmt = FORMATS["E4M3R256"]
    small, paired = MmaBytesCut(1, 8), MmaBytesCut(2, 16, operands=2)
    yield "smallest", cls(fmt, 8, 256, 1, small)
    yield "bias", cls.of(fmt, 70, 512, 5, small, Bias())
    yield "large tile", cls(fmt, 200, 768, 75, MmaBytesCut(2, 32))
    yield "two operands", cls.of(fmt, 250, 768, 17, MmaBytesCut(2, 16, 1, 2, 2, 2, 2), Bias())
    yield "splits", cls.of(fmt, 130, 1280, 17, MmaBytesCut(1, 24, 2, x_stages=2), Residual())
    yield "more splits than tiles", cls(fmt, 65, 256, 9, MmaBytesCut(1, 8, 2))
    yield "gated", cls.of(fmt, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "two matrices", cls(fmt, 192, 256, 12, paired, others=((fmt, 33),))
    some = Adapted(2, 8, places=(0, 1), count=2)
    yield "adapted", cls.of(fmt, 96, 512, 30, paired, some, Gated())
