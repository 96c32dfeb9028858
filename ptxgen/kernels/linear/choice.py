"""Which kernel multiplies activations with weight matrices, and what it may take of an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from urdir.ptxgen.kernels.attention.choice import INCREMENTAL_KEYS
from urdir.ptxgen.kernels.linear.cut import CutOptions
from urdir.ptxgen.kernels.linear.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.gemv import Activations, Gemv
from urdir.ptxgen.kernels.linear.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, SHARED_NBYTES, LinearSpec
from urdir.ptxgen.kernels.linear.summary import SUMMARY
from urdir.ptxgen.weights.formats import Format

#: See `cluster_for`. On an H200 an 8B model's gate and up, 14 tiles, are slower in clusters.
CLUSTERED_TILES = 6


def takes_gemm(rows: int, exact: bool) -> bool:
    """Whether so many rows of activations are for `Gemm`; others are for `choose_linear`.

    `Gemm` rounds activations to f16: never where they are to stay ``exact``, else from the number
    of rows on where its tensor cores win. Measured on an H200, Q4_K, 8 rows, microseconds of gemm:
    51 (14336 x 4096), 62 (4096 x 14336), 21 (4096 x 4096); with `GemmSmall` a whole layer of an 8B
    model takes 40.
    """
    return not exact and rows > MAX_BATCH


def fills_sms(keys: int) -> bool:
    """Whether a launch after attention to that many keys has CTAs on SMs that it does not need.

    The next launch would put two CTAs on an SM without one. After split attention it does, and
    then takes as long as these two: 397 tokens/s instead of 361 at 32,768 keys (8B Q4_K_M on an
    H200). After the short kernel the idle CTAs only cost, 728 instead of 732.
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
        """CTAs of decode steps that an SM has room for, the next launch's included."""
        return 1 if self.shared_per_sm < 3 * SHARED_NBYTES else 2

    def shared(self, larger: bool) -> tuple[int, int]:
        """Bytes of shared memory that a decode step's CTA takes at least and at most.

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


@dataclass(frozen=True, slots=True)
class LinearRequest:
    """What is asked of a launch for few rows, on a device of those ``limits``.

    ``matrices``: (format, rows) of each, which have ``cols`` columns in common. ``bias``, ``eps``,
    ``residual`` and ``gated`` as `LinearSpec` has them, ``fill`` as `CutOptions`. ``exact``:
    activations stay f32. ``alone``: no launch overlaps it (`Gemv`). ``summarised``: x comes with
    its summary; ``summarises``: y gets one where it can (`GemmSmall`); both of several rows only.
    """

    limits: Limits
    matrices: tuple[tuple[Format, int], ...]
    cols: int
    batch: int = 1
    exact: bool = False
    bias: bool = False
    eps: float | None = None
    residual: bool = False
    gated: bool = False
    fill: bool = False
    alone: bool = False
    summarised: bool = False
    summarises: bool = False

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return tuple(fmt for fmt, _ in self.matrices)

    @property
    def options(self) -> CutOptions:
        """What the cut may take of an SM.

        In a layer launches with a residual and launches without one follow each other: one kind
        takes the larger share of the shared memory, the other what is left. The larger ones have a
        residual for one vector, none for several: on an H200 a step of 2 and 4 sequences of an 8B
        Q4_K_M model takes 1.56 and 1.60 ms, the other way round 1.80 and 1.86.
        """
        least, most = self.limits.shared(larger=self.residual == (self.batch == 1))
        return CutOptions(
            shared=most,
            least_shared=least,
            resident=self.limits.resident,
            sms=self.limits.sms,
            fill=self.fill,
        )


def cluster_for(limits: Limits, tiles: int, blocks: int) -> int:
    """CTAs of a cluster, for several vectors times so many tiles an SM, and blocks a row.

    With few tiles to a block, rounding the block's activations is much of the work: two CTAs with
    half of the columns and twice the tiles each have half of it. Measured on an H200, 8B Q4_K_M:
    1.60 and 1.84 ms a step of 4 and 8 sequences in place of 1.63 and 2.01. With many tiles their
    sums outgrow shared memory. Pairs of SMs always find room; of fours an H200 holds 30 at once,
    and a launch that is cut for 33 takes twice as long.
    """
    return 2 if limits.cluster > 1 and tiles <= CLUSTERED_TILES and blocks > 1 else 1


@lru_cache(maxsize=256)  # one object for equal requests: layers share what is worked out for each
def choose_linear(request: LinearRequest) -> LinearSpec:
    """The kernel for a request, and its cut: `Gemv` for one vector; for several `GemmSmall`, which
    rounds activations to 16 bits, where weights are quantised; `GemvF32` for what is left.
    """
    options = request.options
    floats = request.exact or any(fmt.is_float for fmt in request.formats)
    if request.batch > 1 and not floats:
        return _gemm_small(request, options)
    activations: Activations = "f32" if floats else "i16"
    fits = Gemv.fits(request.formats, request.cols, activations, options.shared)
    if request.batch > 1 or not fits:
        return GemvF32(**_fields(request), batch=request.batch)
    return Gemv(**_fields(request), **vars(options), activations=activations, alone=request.alone)


def _gemm_small(request: LinearRequest, options: CutOptions) -> GemmSmall:
    summarises = request.summarises and request.matrices[0][1] % SUMMARY == 0
    whole = GemmSmall(
        **_fields(request),
        **vars(options),
        batch=request.batch,
        summarised=request.summarised,
        summarises=summarises,
    )
    cut = whole.cut
    cluster = cluster_for(request.limits, whole.pair * cut.rows.tiles, cut.columns.blocks)
    kernel = replace(whole, cluster=cluster)
    if kernel.cut.rows.passes == 1:
        return kernel
    # With several passes it takes all: it is long enough that nothing is lost where it does not
    # overlap its neighbours. On an H200 an 8B Q4_K_M model's output so takes 1.768 ms a step of 8
    # sequences instead of 1.782.
    return replace(kernel, shared=request.limits.shared_per_cta, least_shared=0)


def _fields(request: LinearRequest) -> dict[str, Any]:
    """Those of `LinearSpec`."""
    (fmt, rows), *others = request.matrices
    return {
        "format": fmt,
        "rows": rows,
        "cols": request.cols,
        "bias": request.bias,
        "eps": request.eps,
        "residual": request.residual,
        "gated": request.gated,
        "others": tuple(others),
    }
