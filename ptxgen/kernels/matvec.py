"""Matrix-vector products (GEMV) of repacked weights of every type, for up to eight vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, UNIT, Format, random_blocks
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

CTA_THREADS = 128
#: Threads with a unit each that fill a big GPU (132 SMs x 1,024); rows are shared beyond that.
FULL = 1 << 17
#: Activation vectors that one launch takes at most.
MAX_BATCH = 8
#: Sums that a thread may hold (rows of its own x batch rows): registers bind beyond that.
MAX_SUMS = 16


def choose_team(units: int) -> int:
    """Threads that share a row of ``units`` units: a power of two up to 128.

    As many as possible, as long as few of them idle in the last round.
    """
    if units <= 32:
        return 1 << (units - 1).bit_length()
    teams = [t for t in (32, 64, 128) if t < 2 * units]
    least = min(ceil_div(units, t) * t for t in teams)
    return max(t for t in teams if 8 * ceil_div(units, t) * t <= 9 * least)


def choose_rows(fmt: Format, rows: int, units: int, batch: int = 1) -> int:
    """Rows that a thread takes together: 1, 2 or 4, so that enough threads are left.

    No more than 128 bytes of a plane in flight a thread, and ``MAX_SUMS`` sums: registers bind
    beyond that.
    """
    widest = max(p.nbytes for p in fmt.planes)
    most = min(rows, 128 // widest, MAX_SUMS // batch)
    fitting = [r for r in (4, 2) if r <= most and rows // r * units >= FULL]
    return fitting[0] if fitting else 1


@dataclass(frozen=True)
class Matvec(KernelSpec):
    """Matrix-vector products y[b] = W x[b] (+ bias), W (rows, cols) of any weight type, repacked.

    ``batch``: 1 to 8 vectors; the weights are read once for all of them. Activations, products and
    sums are f32, and the sums' order depends on the matrix alone: y[b] has the same bits in every
    batch. ``threads`` (that share a row) and ``rows_each`` (rows of one thread) are 0 for the
    choice by shape.
    """

    format: Format
    rows: int
    cols: int
    bias: bool = False
    threads: int = 0
    rows_each: int = 0
    batch: int = 1

    name = "matvec"
    template = ("urdir.templates", "matvec.ptx.j2")

    def __post_init__(self) -> None:
        multiple = max(p.units for p in self.format.planes)
        team = self.team_threads
        if team & (team - 1) or not multiple <= team <= CTA_THREADS:
            raise PtxgenError(
                f"matvec: threads is {team}: a power of two, {multiple} to {CTA_THREADS}"
            )
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"matvec: batch is {self.batch}: 1 to {MAX_BATCH}")
        if not 1 <= self.team_rows <= self.rows:
            raise PtxgenError(f"matvec: rows_each is {self.team_rows} of {self.rows} rows")

    @cached_property
    def layout(self) -> Layout:
        """How the weights lie in memory."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def params(self) -> tuple[Param, ...]:
        bias = (Param("bias", "f32", ("rows",), Access.IN),) if self.bias else ()
        return (
            Param("weights", "u8", ("weight_nbytes",), Access.IN),
            Param("x", "f32", ("batch", "cols"), Access.IN),
            *bias,
            Param("y", "f32", ("batch", "rows"), Access.OUT),
        )

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the repacked matrix."""
        return self.layout.nbytes

    @property
    def team_threads(self) -> int:
        """Threads of a team: they share its rows."""
        return self.threads or choose_team(self.layout.row_units)

    @property
    def team_rows(self) -> int:
        """Rows of a team."""
        return self.rows_each or choose_rows(
            self.format, self.rows, self.layout.row_units, self.batch
        )

    @property
    def team_warps(self) -> int:
        """Warps of a team, 1 for a team inside a warp."""
        return max(1, self.team_threads // 32)

    @property
    def cta_teams(self) -> int:
        """Teams of a CTA."""
        return CTA_THREADS // self.team_threads

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(ceil_div(self.rows, self.team_rows), self.cta_teams)
        return LaunchShape(grid=(ctas, 1, 1), block=(CTA_THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Rounding of the f32 sums: 2e-7 to 6e-7 of the largest output measured.

        The sum of a single row may cancel: ``atol`` is one rounding of a term of about 30, what
        random weights and activations make.
        """
        return Tolerance(rtol=2e-6, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = self.layout.unpack(inputs["weights"]).astype(np.float64)
        y = inputs["x"].astype(np.float64) @ weights.T
        if self.bias:
            y += inputs["bias"]
        return {"y": y.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        blocks = random_blocks(self.format, self.rows * self.cols // self.format.block, rng)
        inputs = {
            "weights": self.layout.pack(blocks),
            "x": rng.standard_normal((self.batch, self.cols)).astype(np.float32),
        }
        if self.bias:
            inputs["bias"] = rng.standard_normal(self.rows).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Sequence[Matvec]:
        odd = {f: 37 if f.is_float else f.block * 9 % 1536 for f in FORMATS.values()}
        each = [cls(f, 17, cols, bias=i % 2 == 0) for i, (f, cols) in enumerate(odd.items())]
        q8, q4_k = FORMATS["Q8_0"], FORMATS["Q4_K"]
        return (
            cls(q8, 3, UNIT),
            *each,
            cls(q8, 5, 896, rows_each=2),
            cls(FORMATS["F16"], 3, 2085),
            cls(q4_k, 9, 2304, threads=64, rows_each=4),
            cls(q4_k, 3, 4864, bias=True, rows_each=2),
            cls(q8, 1, UNIT, batch=8),
            cls(q4_k, 5, 512, bias=True, batch=8),
            cls(q8, 9, 4864, threads=128, rows_each=2, batch=4),
            cls(FORMATS["Q6_K"], 7, 512, batch=3),
            cls(FORMATS["F32"], 5, 37, bias=True, batch=8),
            cls(FORMATS["Q2_K"], 5, 256, rows_each=4, batch=2),
        )

    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.cols
