"""How a product of packed activations by ``mma.sync`` is cut: an estimate of its time for each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.gemm_mma import GemmMma, MmaCut
from urdir.ptxgen.kernels.linear.packed_product import CTA_COST
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.packed import GROUP

#: The targets whose products they are, where there is nothing better.
TARGETS = since(80)
#: Row groups, splits and operands.
SHAPES = ((1, 4, 1), (1, 2, 1), (2, 2, 1), (2, 1, 1), (2, 2, 2), (4, 1, 1), (4, 1, 2), (2, 1, 2))
#: The most vectors of a CTA.
MOST = 128
#: Stages of weights, stages of activations and their slices, deepest first.
RINGS = ((4, 4, 2), (3, 4, 2), (3, 3, 2), (2, 3, 2), (2, 3, 1), (2, 2, 1))


@lru_cache(maxsize=256)
def choose_mma(product: GemmMma, limits: Limits) -> GemmMma:
    """The product, cut for a device with these ``limits``; the cut that it has does not matter.

    Raises PtxgenError where no cut fits.
    """
    ways = list(_ways(product, limits))
    if not ways:
        raise PtxgenError(f"{product} fits no CTA of {limits.shared_per_cta} bytes")
    return min(ways, key=lambda way: estimate(way, limits))


def any_cut(batch: int) -> MmaCut:
    """A cut that every product of ``batch`` vectors may have at first."""
    return MmaCut(2, min(64, GROUP * ceil_div(batch, GROUP)), x_stages=2)


def estimate(product: GemmMma, limits: Limits) -> float:
    """us on an H200."""
    raise NotImplementedError


def _ways(product: GemmMma, limits: Limits) -> Iterator[GemmMma]:
    raise NotImplementedError
