"""Matrix-vector products (GEMV) in f32, of 1 to 8 vectors with weights of every type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Bounded
from urdir.ptxgen.kernels.linear.products.gemv_f32_examples import gemv_f32_examples
from urdir.ptxgen.kernels.linear.spec import SMS, LinearSpec, side_by_side
from urdir.ptxgen.kernels.linear.steps import Part
from urdir.ptxgen.spec import LaunchShape, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_ROWS

#: Sums that a thread may hold (rows of its own x batch rows): more do not fit in registers.
MAX_SUMS = 16
#: Bytes of raw weights in a thread's registers, at most, unless a unit of one row takes more.
MAX_RAW = 128
#: Warps that each SM has registers for (128 a thread), and those of a CTA, which share x.
SM_WARPS, CTA_WARPS = 16, 8
#: Bytes of a unit's activations in shared memory, padded to an odd number of 16 bytes: those of
#: eight lanes are in different banks.
RECORD_NBYTES = 144
#: Bytes of shared memory for a panel of activations.
PANEL_NBYTES = 47 * 1024


def choose_rows(total: int, choices: Sequence[int]) -> int:
    """How many rows a warp takes at a time, one of ``choices``.

    The most with which all warps of a big GPU have about the same share of the ``total`` rows:
    within 5 % of the best number.
    """
    cost = {r: r * ceil_div(total, SMS * SM_WARPS * r) for r in choices}
    return max(r for r in cost if 20 * cost[r] <= 21 * min(cost.values()))


@dataclass(frozen=True, slots=True)
class Panels:
    """The activations that are in shared memory at a time: ``units`` of each vector (all, or a
    power of two). ``count`` panels are a row."""

    units: int
    count: int

    record_nbytes = RECORD_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of a panel of one vector."""
        return self.units * RECORD_NBYTES


@dataclass(frozen=True, slots=True)
class Cut:
    """A CTA of ``warps``, ``residents`` of them an SM. A warp takes ``rows`` of each matrix at a
    time, which share its reads of x, and ``passes`` such groups one after the other. A lane works
    on ``dots`` rows of weights at once, and loads ``depth`` units of each ahead. It takes
    ``rounds`` units of a row, some of the last ones beyond it."""

    warps: int
    residents: int
    rows: int
    passes: int
    dots: int
    depth: int
    rounds: int


def panels_of(row_units: int, batch: int) -> Panels:
    """The panels of rows of as many units."""
    units = 32 * ceil_div(row_units, 32)
    most = PANEL_NBYTES // (batch * RECORD_NBYTES) // 32 * 32
    if units > most:
        units = 1 << (most.bit_length() - 1)
    return Panels(units, ceil_div(row_units, units))


@dataclass(frozen=True)
class GemvF32(LinearSpec):
    """y[b] = W x[b] for 1 to 8 vectors, W (rows, cols) of any weight type, repacked.

    The weights are read once for all vectors, and y[b] has the same bits in every batch, because
    the sums' order depends on the matrices' shapes alone. Everything is f32.

    How a launch is cut is chosen by shape where a field is 0: ``warps`` of a CTA, ``rows_each``
    rows of a warp at a time (of both matrices if gated), ``stages`` units of each row that a lane
    loads ahead, ``passes`` groups of rows that a warp takes one after the other, ``resident`` CTAs
    that an SM has registers for.
    """

    batch: int = 1
    warps: int = 0
    rows_each: int = 0
    stages: int = 0
    passes: int = 0
    resident: int = 0

    name = "gemv_f32"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @cached_property
    def panels(self) -> Panels:
        """How activations pass through shared memory."""
        return panels_of(self.layout.row_units, self.batch)

    @cached_property
    def cut(self) -> Cut:
        """How the launch is cut."""
        return _cut(self)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        cta_rows = self.cut.warps * self.cut.rows * self.cut.passes
        return side_by_side(self.layouts, [cta_rows] * len(self.layouts))

    def quads_at_once(self, units: int) -> int:
        """Quads (four columns) of each vector's ``units`` that a thread loads at a time."""
        each = ceil_div(8 * units, self.launch_shape.threads)
        return ceil_div(each, ceil_div(each, max(1, 6 // self.batch)))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = sum(part.ctas for part in self.parts)
        return LaunchShape(
            grid=(ctas, 1, 1), block=(32 * self.cut.warps, 1, 1), resident=self.cut.residents
        )

    @property
    def tolerance(self) -> Tolerance:
        """Rounding of the sums, 2e-7 to 6e-7 of the largest output measured.

        The sum of a single row may cancel: ``atol`` is one rounding of a term of about 30, the
        size that random weights and activations give.
        """
        return Tolerance(rtol=5e-6 if self.steps.f or self.steps.has(Bounded) else 2e-6, atol=2e-6)

    @classmethod
    def examples(cls) -> dict[str, GemvF32]:
        return gemv_f32_examples(cls)


def _check(of: GemvF32) -> None:
    """Raise PtxgenError for a launch that cannot be cut as it asks."""
    if of.warps > 32:
        raise PtxgenError(f"gemv_f32: warps is {of.warps}: 1 to 32")
    if of.rows_each not in (0, *_rows_choices(of, of.rows_each)):
        raise PtxgenError(
            f"gemv_f32: rows_each is {of.rows_each} of {of.rows} rows: it must divide them, and "
            f"{TILE_ROWS}"
        )
    panels, depth = of.panels, of.cut.depth
    if panels.count > 1 and (of.passes > 1 or panels.units // 32 % depth):
        raise PtxgenError(
            f"gemv_f32: {of.cols} columns are more than a panel: "
            f"passes is {of.passes} instead of 1, or stages ({depth}) no power of two"
        )


def _cut(of: GemvF32) -> Cut:
    warps, widest = of.warps or CTA_WARPS, _widest(of)
    total = of.rows + sum(rows for _, rows in of.others)
    # Rows of each matrix that a thread has registers for, with two units of each.
    raw, sums = MAX_RAW // 2 // widest, MAX_SUMS // of.batch
    most = max(1, min(4, raw, sums if of.batch > 1 else 4) // of.steps.pair)
    rows = of.rows_each or choose_rows(total, _rows_choices(of, most))
    dots = rows * of.steps.pair
    has_many_sums = dots * of.batch > MAX_SUMS // 2
    heavy = has_many_sums or dots * max(1, of.stages) * widest > MAX_RAW
    residents = of.resident or max(1, SM_WARPS // warps // (2 if heavy else 1))
    groups, passes = ceil_div(total, rows), 1
    if of.panels.count == 1:
        passes = of.passes or ceil_div(groups, warps * SMS * residents)
    fitting = max(1, min(1 if has_many_sums or of.steps.gated else 2, MAX_RAW // (dots * widest)))
    rounds = ceil_div(of.layout.row_units, 32)
    stages = of.stages or 1 << fitting.bit_length() - 1
    depth = min(stages, rounds, of.panels.units // 32)
    if passes > 1 and not of.stages:  # so that loads run on into the next rows
        depth = max(d for d in range(1, depth + 1) if rounds % d == 0)
    return Cut(warps, residents, rows, passes, dots, depth, rounds)


def _widest(of: GemvF32) -> int:
    """Bytes of the largest item of a plane."""
    return max(p.nbytes for fmt in of.formats for p in fmt.planes)


def _rows_choices(of: GemvF32, most: int) -> list[int]:
    """Numbers of rows that divide a tile and every matrix: no warp then has rows of two."""
    matrices = (of.rows, *(rows for _, rows in of.others))
    return [r for r in range(1, most + 1) if not any(n % r for n in (TILE_ROWS, *matrices))]
