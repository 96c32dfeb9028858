"""Which kernel multiplies activations with a weight matrix, and what it may take of an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from urdir.ptxgen.kernels.attention.choice import INCREMENTAL_KEYS
from urdir.ptxgen.kernels.linear.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.gemv import Activations, Gemv
from urdir.ptxgen.kernels.linear.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.product import MAX_BATCH, SHARED_NBYTES, FusedProduct
from urdir.ptxgen.kernels.linear.summary import SUMMARY
from urdir.ptxgen.weights.formats import Format

#: The largest batch whose products have kernels for few vectors. Measured on an H200, Q4_K, 8 rows,
#: microseconds of gemm: 51 (14336 x 4096), 62 (4096 x 14336), 21 (4096 x 4096); in `GemmSmall`
#: a whole layer of an 8B model takes 40.
LAST_MATVEC = MAX_BATCH
#: See `batch_cluster`. On an H200 an 8B model's gate and up, 14 tiles, are slower in clusters.
CLUSTERED_TILES = 6


def choose_product(batch: int, exact: bool) -> Literal["gemv_f32", "gemm"]:
    """The kernel for ``batch`` activation vectors.

    ``exact`` asks for f32 activations: always "gemv_f32", which takes ``MAX_BATCH`` of them a
    launch (a larger batch in slices). Else "gemm", which rounds activations and weights to f16,
    from the batch on where its tensor cores win.
    """
    return "gemv_f32" if exact or batch <= LAST_MATVEC else "gemm"


def fills_sms(keys: int) -> bool:
    """Whether a product behind attention to that many keys has CTAs on SMs that it does not need.

    The next launch would put two CTAs on an SM without one. Behind split attention it does, and
    then takes as long as these two: 397 tokens/s instead of 361 at 32,768 keys (8B Q4_K_M on an
    H200); behind the short kernel the idle CTAs only cost, 728 instead of 732.
    """
    return keys > INCREMENTAL_KEYS


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has: SMs, bytes of shared memory of an SM and at most of a CTA, and CTAs of a
    cluster at most (1: it has none)."""

    sms: int
    shared_per_sm: int
    shared_per_cta: int
    cluster: int = 1

    @property
    def resident(self) -> int:
        """CTAs of decode products that an SM has room for, the next launch's included."""
        return 1 if self.shared_per_sm < 3 * SHARED_NBYTES else 2

    def shared(self, larger: bool) -> tuple[int, int]:
        """Bytes of shared memory that a decode product's CTA takes at least and at most.

        An SM should hold one CTA of a launch, and one of the next, which loads weights meanwhile.
        So the ``larger`` ones take more than half of it, the others what is left: two of a kind
        meet only where the SM is empty otherwise. Measured on an H200: 727 tokens/s instead of 614
        with halves for all. Where half is too little, a CTA takes all. The driver keeps 1 KB of
        each.
        """
        if self.resident == 1:
            return 0, self.shared_per_cta
        if larger:
            return self.shared_per_sm // 2 + 1024, self.shared_per_sm * 5 // 9 - 1024
        return 0, self.shared_per_sm * 4 // 9 - 1024


def batch_cluster(limits: Limits, tiles: int, blocks: int) -> int:
    """CTAs of a cluster, for a batch whose product has so many tiles an SM, and blocks a row.

    With few tiles to a block, rounding the block's activations is much of the work: two CTAs with
    half of the columns and twice the tiles each have half of it. Measured on an H200, 8B Q4_K_M:
    1.60 and 1.84 ms a step of 4 and 8 sequences in place of 1.63 and 2.01. With many tiles their
    sums outgrow shared memory. Pairs of SMs always find room; of fours an H200 holds 30 at once,
    and a launch that is cut for 33 takes twice as long.
    """
    return 2 if limits.cluster > 1 and tiles <= CLUSTERED_TILES and blocks > 1 else 1


def vector_product(
    limits: Limits,
    exact: bool,
    fmt: Format,
    rows: int,
    cols: int,
    *,
    batch: int = 1,
    fill: bool = False,
    alone: bool = False,
    summarised: bool = False,
    summarises: bool = False,
    **fields: Any,
) -> FusedProduct:
    """The product of few activation vectors, as `FusedProduct` has it: the kernel that decode steps
    use on a device, and its cut.

    Quantised weights get activations of 16 bits, unless ``exact``: one vector in `Gemv`,
    several in `GemmSmall`; `GemvF32` takes what is left. In a layer launches with a residual and
    launches without one follow each other: of shared memory one kind takes the larger share, the
    other what is left; a batch's product of several passes takes all. ``fill``: see `TiledProduct`;
    ``alone``, of one vector: see `Gemv`; ``summarised`` and ``summarises``, of several: see
    `GemmSmall`, the latter where it can.
    """
    formats = (fmt, *(other for other, _ in fields.get("others", ())))
    floats = exact or any(each.is_float for each in formats)
    activations: Activations = "f32" if floats else "i16"
    # The larger ones have a residual for one vector, none for several: on an H200 a step of 2 and
    # 4 sequences of an 8B Q4_K_M model takes 1.56 and 1.60 ms, the other way round 1.80 and 1.86.
    residual = fields.get("residual", False)
    least, most = limits.shared(larger=residual if batch == 1 else not residual)
    cut: dict[str, Any] = {
        "shared": most,
        "least_shared": least,
        "resident": limits.resident,
        "sms": limits.sms,
        "fill": fill,
    }
    if batch > 1 and not floats:
        whole = GemmSmall(
            fmt,
            rows,
            cols,
            batch=batch,
            summarised=summarised,
            summarises=summarises and rows % SUMMARY == 0,
            **cut,
            **fields,
        )
        cluster = batch_cluster(limits, whole.pair * whole.tiles, whole.blocks)
        product = replace(whole, cluster=cluster)
        if product.passes > 1:
            # Long enough that nothing is lost where it does not overlap its neighbours: on an H200
            # an 8B Q4_K_M model's output so takes 1.768 ms a step of 8 sequences instead of 1.782.
            product = replace(product, shared=limits.shared_per_cta, least_shared=0)
        return product
    if batch > 1 or not Gemv.fits(formats, cols, activations, most):
        return GemvF32(fmt, rows, cols, batch=batch, **fields)
    return Gemv(fmt, rows, cols, activations=activations, alone=alone, **cut, **fields)
