"""Choose the kernel that multiplies activations with weight matrices, and its share of an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from urdir.ptxgen.kernels.linear.cut import CutOptions
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.then import Continued, has_registers
from urdir.ptxgen.kernels.linear.products import gemm_small
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.products.gemv_room import Activations, has_room
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, SHARED_NBYTES, LinearSpec
from urdir.ptxgen.kernels.linear.steps import Prologue, S, Step, find, in_order
from urdir.ptxgen.kernels.summary import SUMMARY
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_COLS, Layout

#: Most tiles an SM of a launch in clusters: see `cluster_for`. On an H200 the gate and up matrices
#: of an 8B model, 14 tiles, are slower in clusters.
CLUSTERED_TILES = 6
#: Blocks a row of packed activations up to which each warp has one, and launches of several tiles
#: an SM have no clusters: nothing is rounded. On an H200 a step of 8 sequences of qwen3-30b-a3b
#: takes 1.869 ms without clusters of Q, K and V, else 1.905 (in another call 1.825, 1.903); but
#: without those of the attention output, of twice as many blocks, 1.925 (2026-11-29).
UNCLUSTERED_BLOCKS = 8
#: From how many vectors on products without a norm take packed activations. On an H200 a step of 2,
#: 4 and 8 sequences of an 8B Q4_K_M model takes 1.348, 1.387 and 1.550 ms if the down matrices do
#: so, else 1.342, 1.400 and 1.648.
PACKED_FROM = 4
#: The same of products with a norm. On an H200 a step of 8 sequences of an 8B Q4_K_M model takes
#: 1.450 ms so, else 1.506; of an 8B Q8_0 model 2.213 and 2.287.
PACKED_NORMS_FROM = 5
#: The same of both, of types that `pay_early`. On an H200 a step of 2, 3 and 4 sequences of an 8B
#: NVFP4 model takes 1.379, 1.387 and 1.390 ms so, else 1.549, 1.594 and 1.522.
PACKED_EXACT_FROM = 2
#: The same of both, of types with a table of two digits: a tile takes 405 instructions as integers
#: with up to four vectors, 828 with more, and 630 as halves. On an H200 a step of 2 and 4 sequences
#: of an 8B NF4 model takes 1.866 and 1.923 ms so, else 2.301 and 2.316.
PACKED_DIGITS_FROM = 5
#: Types of which products with a norm round f32 vectors: a tile takes fewer instructions with
#: integers than as halves (SASS: Q5_K 332 and 391, IQ4_XS 438 and 503, IQ3_XXS 457 and 520, IQ2_XXS
#: 360 and 406; but Q6_K 437 and 373, Q8_0 312 and 271, MXFP4 490 and 354, IQ2_XS 723 and 446).
INTEGERS_AFTER_NORMS = frozenset({"Q5_K", "IQ4_XS", "IQ3_XXS", "IQ2_XXS"})
#: Bytes of float matrices from which on `GemmSmall` multiplies them. Smaller ones, of routers and
#: gates, are read in a launch's latency, and keep f32 activations. On an H200 a step of 2, 4 and 8
#: sequences of an 8B BF16 model takes 3.97, 3.94 and 4.30 ms, by `GemvF32` 4.4, 6.9 and 11.8.
FLOATS_NBYTES = 2 << 20


def takes_gemm(rows: int, exact: bool) -> bool:
    """Whether `Gemm` multiplies this many rows; `choose_linear` serves the others.

    `Gemm` rounds activations to f16, so it is never used if they stay ``exact``. Otherwise it is
    used from the number of rows on at which it is faster. Measured on an H200, Q4_K, 8 rows: `Gemm`
    takes 51 us (14336 x 4096), 62 us (4096 x 14336) and 21 us (4096 x 4096); with `GemmSmall` a
    whole layer of an 8B model takes 40 us.
    """
    return not exact and rows > MAX_BATCH


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of a device: SMs, bytes of shared memory of an SM, the most bytes of a CTA, and the
    most CTAs of a cluster (1: no clusters); and its native target."""

    sms: int
    shared_per_sm: int
    shared_per_cta: int
    cluster: int = 1
    target: str = "sm_75"

    @property
    def resident(self) -> int:
        """CTAs of decode steps that an SM has room for, the next launch's included."""
        return 1 if self.shared_per_sm < 3 * SHARED_NBYTES else 2

    def shared(self, larger: bool, several: bool = False) -> tuple[int, int]:
        """Bytes of shared memory that a decode step's CTA takes at least and at most.

        An SM should hold one CTA of a launch and one of the next, which loads weights meanwhile.
        So CTAs of ``larger`` launches take more than half of the memory, the others the rest: two
        CTAs of one launch share an SM only where no other CTA is. Measured on an H200: 727
        tokens/s, 614 with halves for all. Of one vector the larger share is 29 parts of 52: an 8B
        NVFP4 model's down matrices have room for a fifth slot then, and it decodes at 797.0
        tokens/s, 793.0 with 5 of 9; gate and up of IQ1_S have room for a third one. Of ``several``
        it is 21 of 37: the sums of an 8B model's gate and up leave room for a fourth slot then, and
        a step of 8 sequences takes 1.657 ms, not 1.673. Where half is too little, a CTA takes all.
        The driver keeps 1 KB of each.
        """
        if self.resident == 1:
            return 0, self.shared_per_cta
        most, parts = (21, 37) if several else (29, 52)
        if larger:
            return self.shared_per_sm // 2 + 1024, self.shared_per_sm * most // parts - 1024
        return 0, self.shared_per_sm * (parts - most) // parts - 1024


@dataclass(frozen=True, slots=True)
class LinearRequest:
    """What a launch for few rows has to compute, on a device with these ``limits``.

    ``matrices``: (format, rows) of each; all have ``cols`` columns. ``steps``: what comes before
    and after the products, in any order. Deferred adds, `Gate`, `SigmoidScaled` and `Send` are for
    one vector if `fits_gemv`, `Continued` if `continues`; `BegunNorm` and `BeginNorm` for several
    rows (`rounds_several`), `PackedInput` if `takes_packed`, `PackedOutput` if `can_pack`.

    ``exact``: activations stay f32. ``fill``: that of `CutOptions`. ``ends_block``: the product is
    the last of a block; with a residual it is. ``alone``: no other launch overlaps this one
    (`Gemv`). ``starts_next``: that of `GemmSmall`.
    """

    limits: Limits
    matrices: tuple[tuple[Format, int], ...]
    cols: int
    batch: int = 1
    exact: bool = False
    steps: tuple[Step, ...] = ()
    fill: bool = False
    ends_block: bool = False
    alone: bool = False
    starts_next: bool = False

    def plus(self, *steps: Step) -> LinearRequest:
        """The request with more steps."""
        return replace(self, steps=(*self.steps, *steps))

    def find(self, kind: type[S]) -> S | None:
        """The step of a kind, None without one."""
        return find(self.steps, kind)

    def has(self, kind: type[Step]) -> bool:
        """Whether there is a step of a kind."""
        return self.find(kind) is not None

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return tuple(fmt for fmt, _ in self.matrices)

    @property
    def rounds_several(self) -> bool:
        """Whether `GemmSmall` serves: several vectors that may be rounded."""
        serves = self.batch > 1 and not self.exact and gemm_small.takes(self.formats, self.cols)
        return serves and (self.formats[0].arithmetic == "integers" or self._floats_pay)

    @property
    def _floats_pay(self) -> bool:
        """Whether it serves float matrices: on tensor cores that take such numbers."""
        nbytes = sum(Layout(fmt, rows, self.cols).nbytes for fmt, rows in self.matrices)
        is_large = nbytes * (2 if self.has(Gated) else 1) >= FLOATS_NBYTES
        return is_large and Target.parse(self.limits.target).sm >= 80

    @property
    def takes_packed(self) -> bool:
        """Whether the launch takes packed activations: such a product, of matrices whose blocks are
        whole. Without a norm that is one matrix; with one, the type of the first decides."""
        if self.has(Normed) or self.has(BegunNorm):
            first = self.formats[0]
            serves = first.name not in INTEGERS_AFTER_NORMS
            fewest = PACKED_NORMS_FROM
        else:
            serves, fewest = not self.has(Gated) and len(self.matrices) == 1, PACKED_FROM
        if Halves(self.formats[0]).pay_early:
            fewest = PACKED_EXACT_FROM
        elif self.formats[0].digits == 2:
            fewest = PACKED_DIGITS_FROM
        fits = serves and self.cols % TILE_COLS == 0
        several = fits and self.rounds_several and self.batch >= fewest
        several &= not any(fmt.is_float for fmt in self.formats)
        return several and Target.parse(self.limits.target).sm >= 80

    @property
    def can_begin_norm(self) -> bool:
        """Whether the launch can begin the norm that follows its residual."""
        return self.rounds_several and self.matrices[0][1] % SUMMARY == 0

    @property
    def can_pack(self) -> bool:
        """Whether the launch can leave its one product packed; with a residual, the norm that it
        begins."""
        one = len(self.matrices) == 1 and (self.has(BeginNorm) or not self.has(Residual))
        return one and self.rounds_several and self.matrices[0][1] % TILE_COLS == 0

    @property
    def fuses_norm(self) -> bool:
        """Whether the launch can compute the norm: `GemmSmall` subtracts no mean and adds no
        bias."""
        norm = self.find(Normed)
        return norm is None or not self.rounds_several or norm.norm.is_factor

    @property
    def activations(self) -> Activations:
        """What `Gemv` makes of the activations."""
        made: dict[str, Activations] = {"integers": "i16", "e4m3": "f16", "floats": "f32"}
        return "f32" if self.exact else made[self.formats[0].arithmetic]

    @property
    def fits_gemv(self) -> bool:
        """Whether `Gemv` serves."""
        return self.gemv_options is not None

    @property
    def continues(self) -> bool:
        """Whether the launch can go on with the kernel of its `Continued` step: all rows are
        finished in one pass."""
        then = self.find(Continued)
        if then is None or not has_registers(then.kernel) or not self.fits_gemv:
            return False
        others = tuple(step for step in self.steps if step is not then)
        kernel = choose_linear(replace(self, steps=others))
        return isinstance(kernel, Gemv) and kernel.cut.rows.passes == 1

    @property
    def gemv_options(self) -> CutOptions | None:
        """How `Gemv` fits: one CTA has all columns; two share them, if activations are rounded; one
        takes all of the shared memory, and overlaps nothing. None: not at all."""
        if self.batch > 1:
            return None
        ways, prologue = [self.options], [s for s in self.steps if isinstance(s, Prologue)]
        if self.activations != "f32":
            all_of_it = replace(ways[0], shared=self.limits.shared_per_cta, least_shared=0)
            ways += [replace(ways[0], cluster=2)] if self.limits.cluster > 1 else []
            ways += [all_of_it]
        for way in ways:
            given = (self.formats, self.cols, self.activations, way.shared)
            if has_room(*given, prologue, way.cluster):
                return way
        return None

    @property
    def options(self) -> CutOptions:
        """How much of an SM the launch may use.

        In a layer, launches that end a block (with a residual, unless a norm comes between) and
        others alternate. One kind takes the larger share of the shared memory, the other the rest.
        For one vector the larger share is for those that end one, for several vectors for the
        others: on an H200 a step of 2 and 4 sequences of an 8B Q4_K_M model takes 1.56 and 1.60 ms,
        and 1.80 and 1.86 ms with the shares exchanged.
        """
        ends = self.has(Residual) or self.ends_block
        several = self.batch > 1
        least, most = self.limits.shared(larger=ends != several, several=several)
        return CutOptions(
            shared=most,
            least_shared=least,
            resident=self.limits.resident,
            sms=self.limits.sms,
            fill=self.fill,
        )


def cluster_for(limits: Limits, tiles: int, blocks: int, packed: bool = False) -> int:
    """CTAs of a cluster, for several vectors, ``packed`` or not, ``tiles`` an SM and ``blocks`` a
    row.

    With few tiles a block, rounding the block's activations is much of the work. Two CTAs with half
    of the columns and twice the tiles each do half of it. Measured on an H200, 8B Q4_K_M: a step of
    4 and 8 sequences takes 1.60 and 1.84 ms with pairs, 1.63 and 2.01 ms without. With many tiles
    the sums do not fit in shared memory. Pairs of SMs always find room. Of clusters of four an H200
    holds 30 at once, and a launch that is cut for 33 takes twice as long.
    """
    if packed and tiles > 1 and blocks <= UNCLUSTERED_BLOCKS:
        return 1
    return 2 if limits.cluster > 1 and tiles <= CLUSTERED_TILES and blocks > 1 else 1


@lru_cache(maxsize=256)  # one object for equal requests, with its cached properties
def choose_linear(request: LinearRequest) -> LinearSpec:
    """The kernel for a request, with its cut.

    One vector: `Gemv`, if its activations fit in the shared memory of a CTA, or of two. Several
    vectors: `GemmSmall`, which rounds activations to 16 bits, if that is allowed and it has such
    weights. Else `GemvF32`.
    Raises PtxgenError for a norm that the launch does not fuse (`LinearRequest.fuses_norm`), and
    for a step that the product does not take.
    """
    (fmt, rows), *more = request.matrices
    matrix, others = (fmt, rows, request.cols), tuple(more)
    if request.rounds_several:
        steps, fields = in_order(GemmSmall, *request.steps), {"options": request.options}
        early = {"batch": request.batch, "starts_next": request.starts_next}
        whole = GemmSmall.of(*matrix, *steps, others=others, **fields, **early)
        return _fitted(whole, request.limits)
    if (options := request.gemv_options) is None:
        steps = in_order(GemvF32, *request.steps)
        return GemvF32.of(*matrix, *steps, others=others, batch=request.batch)
    steps = in_order(Gemv, *request.steps)
    how = {"activations": request.activations, "alone": request.alone}
    return Gemv.of(*matrix, *steps, others=others, options=options, **how)


def _fitted(whole: GemmSmall, limits: Limits) -> GemmSmall:
    """The product in clusters where that is faster."""
    cut = whole.cut
    is_packed = whole.steps.has(PackedInput)
    cluster = cluster_for(limits, whole.steps.pair * cut.rows.tiles, cut.columns.blocks, is_packed)
    kernel = replace(whole, options=replace(whole.options, cluster=cluster))
    if kernel.cut.rows.passes == 1:
        return kernel
    # With several passes it takes all of the shared memory: it runs so long that overlapping its
    # neighbours matters little. On an H200 a step of 8 sequences of an 8B Q4_K_M model takes 1.768
    # ms if the output matrix does so, else 1.782.
    options = replace(kernel.options, shared=limits.shared_per_cta, least_shared=0)
    return replace(kernel, options=options)
