"""Matrix-vector products (GEMV) of repacked weights of every type, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format, random_blocks
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Activation vectors that one launch takes at most.
MAX_BATCH = 8
#: Sums that a thread may hold (rows of its own x batch rows): registers bind beyond that.
MAX_SUMS = 16
#: Bytes of raw weights in a thread's registers, at most, unless a unit of one row takes more.
MAX_RAW = 128
#: SMs of a big GPU, and the warps that each has registers for (128 a thread).
SMS, SM_WARPS = 132, 16
#: Warps of a CTA, which share the activations: all of an SM where each CTA has to round them.
CTA_WARPS = {"f32": 8, "i16": 16}
#: Bytes of a unit's record in shared memory: 128 of f32 or 64 of two bytes each and 12 of scale and
#: sums, padded to an odd number of 16 bytes, so that eight lanes' records are in different banks.
RECORD_NBYTES = {"f32": 144, "i16": 80}
#: Bytes of shared memory for a panel of activations.
PANEL_NBYTES = 47 * 1024

Activations = Literal["f32", "i16"]


def choose_rows(total: int, least: int, most: int) -> int:
    """Rows of a warp at a time, up to ``most`` and the ``least`` that a matrix has.

    The more the better, as long as all warps of a big GPU have about the same share of the
    ``total`` rows: within 5 % of what the best number does.
    """
    cost = {r: r * ceil_div(total, SMS * SM_WARPS * r) for r in range(1, min(least, most) + 1)}
    return max(r for r in cost if 20 * cost[r] <= 21 * min(cost.values()))


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices of a launch: names of its registers, and the CTAs that work on it."""

    number: int
    layout: Layout
    passes: int
    first_cta: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.layout.rows

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")

    @property
    def weights(self) -> str:
        """Register with the matrix's address."""
        return f"%weights{self.suffix}"

    @property
    def bias(self) -> str:
        """Register with the address of its bias."""
        return f"%bias{self.suffix}"

    @property
    def y(self) -> str:
        """Register with the address of its product."""
        return f"%y{self.suffix}"


@dataclass(frozen=True)
class Matvec(KernelSpec):
    """Matrix-vector products y[b] = W x[b] (+ bias), W (rows, cols) of any weight type, repacked.

    ``batch``: 1 to 8 vectors; the weights are read once for all of them, and y[b] has the same bits
    in every batch, because the sums' order depends on the matrices' shapes alone.

    ``activations``: "f32", or "i16" for quantised weights: 16-bit multiples of the largest in each
    32, relative error 2e-5. Sums are f32.

    Before and after the product: ``eps``: x is RMS-normalised first and multiplied with
    ``norm``. ``residual``: is added to y. ``gated``: y = silu(W x) * (U x), U (``up``) like W.
    ``others``: (format, rows) of more matrices for the same x, each with its own y.

    How a launch is cut is chosen by shape where a field is 0: ``warps`` of a CTA, ``rows_each``
    rows of a warp at a time (of both matrices if gated), ``stages`` units of each row that a lane
    has on their way, ``passes`` groups of rows that a warp takes one after the other, ``resident``
    CTAs that an SM has registers for.
    """

    format: Format
    rows: int
    cols: int
    bias: bool = False
    batch: int = 1
    activations: Activations = "f32"
    eps: float | None = None
    residual: bool = False
    gated: bool = False
    others: tuple[tuple[Format, int], ...] = ()
    warps: int = 0
    rows_each: int = 0
    stages: int = 0
    passes: int = 0
    resident: int = 0

    name = "matvec"
    template = ("urdir.templates", "matvec.ptx.j2")

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise PtxgenError(f"matvec: a matrix of {self.rows} x {self.cols}: both from 1")
        for name in ("warps", "rows_each", "stages", "passes", "resident"):
            if getattr(self, name) < 0:
                raise PtxgenError(f"matvec: {name} is {getattr(self, name)}: 0 chooses by shape")
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"matvec: batch is {self.batch}: 1 to {MAX_BATCH}")
        if self.activations == "i16" and any(m.layout.format.is_float for m in self.matrices):
            raise PtxgenError("matvec: 16-bit integer activations are for quantised weights only")
        if (self.gated and (self.bias or self.residual)) or (self.others and self._has_one_output):
            raise PtxgenError("matvec: gated goes without bias and residual, others without both")
        if not 1 <= self.cta_warps <= 32:
            raise PtxgenError(f"matvec: warps is {self.warps}: 1 to 32")
        if not 1 <= self.warp_rows <= min(m.rows for m in self.matrices):
            raise PtxgenError(f"matvec: rows_each is {self.warp_rows} of {self.rows} rows")
        if self.panels > 1 and (self.passes > 1 or self.panel_units // 32 % self.depth):
            raise PtxgenError(
                f"matvec: {self.cols} columns are more than a panel: "
                f"passes is {self.passes} instead of 1, or stages ({self.depth}) no power of two"
            )

    @property
    def _has_one_output(self) -> bool:
        return self.gated or self.residual

    @cached_property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return Layout(self.format, self.rows, self.cols)

    @cached_property
    def matrices(self) -> tuple[Part, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        parts: list[Part] = []
        for fmt, rows in ((self.format, self.rows), *self.others):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            ctas = ceil_div(ceil_div(rows, self.warp_rows), self.cta_warps * self.warp_passes)
            layout = Layout(fmt, rows, self.cols)
            parts.append(Part(len(parts), layout, self.warp_passes, first, ctas))
        return tuple(parts)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

    @property
    def params(self) -> tuple[Param, ...]:
        """The first matrix' x, weights and y, then weights, bias and y of the others."""
        params = [Param("weights", "u8", (self.layout.nbytes,), Access.IN)]
        if self.gated:
            params.append(Param("up", "u8", (self.layout.nbytes,), Access.IN))
        params.append(Param("x", "f32", ("batch", "cols"), Access.IN))
        if self.eps is not None:
            params.append(Param("norm", "f32", ("cols",), Access.IN))
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        for m in self.matrices:
            if m.number:
                params.append(Param(f"weights{m.suffix}", "u8", (m.layout.nbytes,), Access.IN))
            if self.bias:
                params.append(Param(f"bias{m.suffix}", "f32", (m.rows,), Access.IN))
            params.append(Param(f"y{m.suffix}", "f32", ("batch", m.rows), Access.OUT))
        return tuple(params)

    # ---- how it is cut ----

    @property
    def row_units(self) -> int:
        """Units of a row."""
        return ceil_div(self.cols, UNIT)

    @property
    def rounds(self) -> int:
        """Units of a row that a lane takes, some of the last beyond the row."""
        return ceil_div(self.row_units, 32)

    @property
    def normed(self) -> bool:
        """Whether x is normalised first."""
        return self.eps is not None

    @property
    def has_minimums(self) -> bool:
        """Whether some matrix' groups have an additive term."""
        return any(fmt.has_minimums for fmt in self.formats)

    @property
    def has_half_bytes(self) -> bool:
        """Whether some matrix' quants are half-bytes."""
        return any(fmt.is_half_bytes for fmt in self.formats)

    @property
    def _widest(self) -> int:
        """Bytes of the largest item of a plane."""
        return max(p.nbytes for fmt in self.formats for p in fmt.planes)

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.warps or CTA_WARPS[self.activations]

    @property
    def warp_rows(self) -> int:
        """Rows of each matrix that a warp takes together: they share its reads of x."""
        return self.rows_each or choose_rows(
            self.total_rows,
            min(self.rows, *(rows for _, rows in self.others)) if self.others else self.rows,
            self.most_rows,
        )

    @property
    def most_rows(self) -> int:
        """Rows of each matrix that a thread has registers for, with two units of each."""
        each = 2 if self.gated else 1
        raw, sums = MAX_RAW // 2 // self._widest, MAX_SUMS // self.batch
        return max(1, min(4, raw, sums if self.batch > 1 else 4) // each)

    @property
    def total_rows(self) -> int:
        """Rows of all products."""
        return self.rows + sum(rows for _, rows in self.others)

    @property
    def dots(self) -> int:
        """Rows of weights that a lane works on at once."""
        return self.warp_rows * (2 if self.gated else 1)

    @property
    def depth(self) -> int:
        """Units of each row that a lane has on their way."""
        light = self.batch == 1 and max(len(fmt.planes) for fmt in self.formats) < 5
        most = 4 if light and self.activations == "i16" else 2
        if self._has_many_sums or (self.gated and self.activations == "f32"):
            most = 1
        fitting = max(1, min(most, MAX_RAW // (self.dots * self._widest)))
        depth = min(
            self.stages or 1 << fitting.bit_length() - 1, self.rounds, self.panel_units // 32
        )
        if self.has_passes and not self.stages:  # so that loads run on into the next rows
            depth = max(d for d in range(1, depth + 1) if self.rounds % d == 0)
        return depth

    @property
    def _has_many_sums(self) -> bool:
        return self.dots * self.batch > MAX_SUMS // 2

    @property
    def warp_passes(self) -> int:
        """Groups of rows that a warp takes one after the other."""
        if self.panels > 1:
            return 1
        groups = ceil_div(self.total_rows, self.warp_rows)
        return self.passes or ceil_div(groups, self.cta_warps * SMS * self.cta_residents)

    @property
    def cta_residents(self) -> int:
        """CTAs of an SM at once."""
        raw = self.dots * max(1, self.stages) * self._widest
        heavy = raw > MAX_RAW or (self.activations == "f32" and self._has_many_sums)
        return self.resident or max(1, SM_WARPS // self.cta_warps // (2 if heavy else 1))

    @property
    def has_passes(self) -> bool:
        """Whether warps take more than one group of rows."""
        return self.warp_passes > 1

    # ---- activations in shared memory ----

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations in shared memory."""
        return RECORD_NBYTES[self.activations]

    @property
    def panel_units(self) -> int:
        """Units of the activations that are in shared memory at a time: all, or a power of two."""
        whole = 32 * self.rounds
        most = PANEL_NBYTES // (self.batch * self.record_nbytes) // 32 * 32
        return whole if whole <= most else 1 << (most.bit_length() - 1)

    @property
    def panels(self) -> int:
        """Panels of a row."""
        return ceil_div(self.row_units, self.panel_units)

    @property
    def panel_nbytes(self) -> int:
        """Bytes of a panel for one batch row."""
        return self.panel_units * self.record_nbytes

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = sum(m.ctas for m in self.matrices)
        return LaunchShape(
            grid=(ctas, 1, 1), block=(32 * self.cta_warps, 1, 1), resident=self.cta_residents
        )

    @property
    def tolerance(self) -> Tolerance:
        """f32: rounding of the sums, 2e-7 to 6e-7 of the largest output measured.

        The sum of a single row may cancel: ``atol`` is one rounding of a term of about 30, what
        random weights and activations make. i16: standard normal activations are off by 2e-5 of
        their size, a product by as much of its own, several times that where few rows cancel.
        """
        if self.activations == "i16":
            return Tolerance(rtol=1.5e-4, atol=5e-4)
        return Tolerance(rtol=5e-6 if self.gated else 2e-6, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        if self.eps is not None:
            x *= inputs["norm"] / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)
        outputs = {}
        for m in self.matrices:
            y = x @ m.layout.unpack(inputs[f"weights{m.suffix}"]).astype(np.float64).T
            if self.gated:
                up = self.layout.unpack(inputs["up"]).astype(np.float64)
                with np.errstate(over="ignore"):
                    y = y / (1.0 + np.exp(-y)) * (x @ up.T)
            if self.bias:
                y += inputs[f"bias{m.suffix}"]
            if self.residual:
                y += inputs["residual"]
            outputs[f"y{m.suffix}"] = y.astype(np.float32)
        return outputs

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{m.suffix}": m.layout for m in self.matrices}
        if self.gated:
            layouts["up"] = self.layout
        inputs: dict[str, Any] = {}
        for p in self.params:
            if p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng))
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Sequence[Matvec]:
        odd = {f: 37 if f.is_float else f.block * 9 % 1536 for f in FORMATS.values()}
        each = [cls(f, 17, cols, bias=i % 2 == 0) for i, (f, cols) in enumerate(odd.items())]
        integer = [
            cls(f, 5, cols, activations="i16", residual=i % 2 == 0, rows_each=1 + i % 2)
            for i, (f, cols) in enumerate(odd.items())
            if not f.is_float
        ]
        q8, q4_k, q6_k, f16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))
        return (
            cls(q8, 3, UNIT),
            *each,
            *integer,
            cls(f16, 3, 2085, warps=2, stages=1),
            cls(
                q4_k,
                9,
                2304,
                warps=1,
                rows_each=2,
                stages=3,
                passes=3,
                resident=8,
                activations="i16",
            ),
            cls(q4_k, 3, 4864, bias=True, rows_each=2, residual=True),
            cls(q4_k, 5, 512, bias=True, batch=8),
            cls(q4_k, 5, 512, bias=True, batch=8, activations="i16", rows_each=2),
            cls(q8, 9, 4864, rows_each=1, batch=4, stages=1, activations="i16", eps=1e-5),
            cls(FORMATS["F32"], 5, 37, bias=True, batch=8, eps=1e-5),
            cls(FORMATS["F32"], 3, 12321, eps=1e-5),
            cls(q4_k, 7, 512, batch=2, gated=True, activations="i16", eps=1e-6),
            cls(q6_k, 11, 2048, gated=True, warps=2, passes=2),
            cls(q4_k, 19, 768, bias=True, others=((q4_k, 5), (q6_k, 7)), activations="i16"),
            cls(f16, 6, 96, eps=1e-5, others=((q8, 3), (f16, 9)), warps=2, passes=2, batch=2),
        )

    def flops(self) -> int:
        matrices = 2 if self.gated else 1
        return 2 * self.batch * self.total_rows * self.cols * matrices
