"""How a product of signed bytes is cut for a device: an estimate of its time for each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.products.gemm_bytes import BytesCut, GemmBytes
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.packed import GROUP

#: The targets whose products they are.
TARGETS = ("sm_90a",)
#: From so many rows of activations on they are multiplied as bytes.
LEAST_ROWS = 65
#: Vectors of a CTA, of which any number up to the least may be one.
VECTORS = (64, 96, 128, 160, 192, 208)
#: Stages of weights and of activations, deepest first.
RINGS = ((4, 5), (3, 5), (3, 4), (2, 4), (2, 3), (1, 3), (1, 2))
#: us: of a CTA from its begin to its first product and from its last one to its end; of two row
#: groups, for a tile of 256 columns, and for each vector of it; the same where CTAs share no
#: activations.
BEGIN, TILE, PER_VECTOR, ALONE = 3.0, 0.2, 0.0055, 0.0065


@lru_cache(maxsize=256)
def choose_bytes(product: GemmBytes, sms: int) -> GemmBytes:
    """The product, cut for a device with ``sms`` SMs; the cut that it has does not matter."""
    ways = [replace(product, cut=cut) for cut in _cuts(product)]
    return min(ways, key=lambda way: estimate(way, sms))


def any_cut(batch: int) -> BytesCut:
    """A cut that every product of ``batch`` vectors may have at first."""
    return BytesCut(2, min(64, _whole(batch)), 1, 1)


def estimate(product: GemmBytes, sms: int) -> float:
    """us on an H200."""
    cut, grid = product.cut, product.launch_shape.grid
    waves = ceil_div(grid[0] * grid[1], sms)
    vector = PER_VECTOR if cut.sharers > 1 else ALONE
    return waves * (BEGIN + product.row_tiles * (TILE + vector * cut.vectors))


def _whole(batch: int) -> int:
    """Vectors in whole groups, two groups from 32 on."""
    groups = ceil_div(batch, GROUP)
    return GROUP * (groups if groups < 4 else groups - groups % 2)


def _cuts(product: GemmBytes) -> Iterator[BytesCut]:
    most = _whole(product.batch)
    for vectors in sorted({min(most, each) for each in VECTORS}):
        for sharers in (2, 1):
            cut = _deepest(product, vectors, sharers)
            if cut is not None:
                yield cut


def _deepest(product: GemmBytes, vectors: int, sharers: int) -> BytesCut | None:
    """With the deepest rings that fit; None where none does."""
    for sets in (2, 1):
        for weights, activations in RINGS:
            try:
                cut = BytesCut(2, vectors, weights, activations, sharers, sets)
                replace(product, cut=cut)
            except PtxgenError:
                continue
            return cut
    return None
