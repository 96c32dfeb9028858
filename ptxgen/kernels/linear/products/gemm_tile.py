"""What a CTA of `Gemm` computes, and of a product with experts as `Gemm` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.architecture import STATIC_SHARED_LIMIT
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import UNIT, Format
from urdir.ptxgen.weights.layout import Layout

CTA_THREADS = 128


@dataclass(frozen=True, slots=True)
class CtaTile:
    """What a CTA computes, and how its four warps share it.

    ``batch`` x ``rows`` elements of y, in steps of ``units`` units of columns; ``rows`` x
    ``units`` is the number of threads, each of which unpacks one unit a step. ``warps_batch``
    warps share the batch rows, the others the rows; a warp's part is a multiple of 16 x 8.
    Loads run ``depth`` steps ahead, in registers: small tiles wait for memory, not for the tensor
    cores. If ``depth`` is more than 1, ``units`` is even: two units share bytes of half-bytes,
    and which half a thread takes must be the same in every step.
    """

    batch: int
    rows: int
    units: int
    warps_batch: int
    depth: int = 1

    threads = CTA_THREADS

    def __post_init__(self) -> None:
        parts = self.warps_batch * 16, self.warps_rows * 8
        if (
            self.rows * self.units != self.threads
            or self.batch % parts[0]
            or self.rows % parts[1]
            or self.batch * self.units % (self.threads // 8)
            or not 1 <= self.depth <= (1 if self.units % 2 else 4)
            or self.shared_bytes > STATIC_SHARED_LIMIT
        ):
            raise PtxgenError(f"{self} does not divide into parts for {self.threads} threads")

    @property
    def warps_rows(self) -> int:
        """Warps side by side along the rows."""
        return self.threads // 32 // self.warps_batch

    @property
    def warp_batch(self) -> int:
        """Batch rows of a warp."""
        return self.batch // self.warps_batch

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self.rows // self.warps_rows

    @property
    def m_tiles(self) -> int:
        """16-high matrices along a warp's batch rows."""
        return self.warp_batch // 16

    @property
    def n_tiles(self) -> int:
        """8-wide matrices along a warp's rows."""
        return self.warp_rows // 8

    @property
    def x_vectors(self) -> int:
        """Vectors of four activations that a thread loads a step."""
        return self.batch * self.units * UNIT // 4 // self.threads

    @property
    def stride(self) -> int:
        """Bytes of a row in shared memory: 16 more than its f16 values take, so that eight rows' 16
        bytes at the same column lie in different banks."""
        return 2 * UNIT * self.units + 16

    @property
    def x_offset(self) -> int:
        """Bytes of a stage before its activations: the weights."""
        return self.rows * self.stride

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return (self.rows + self.batch) * self.stride

    @property
    def shared_bytes(self) -> int:
        """Bytes of both stages."""
        return 2 * self.stage_bytes

    def steps(self, layout: Layout) -> int:
        """Steps in which a CTA goes through the columns of a matrix."""
        return ceil_div(layout.row_units, self.units)

    def steps_ahead(self, layout: Layout) -> int:
        """Steps that loads run ahead: as many as a thread has registers for."""
        return max(1, min(self.depth, self.steps(layout), MAX_RAW // widest(layout.format)))


#: That of `Gemm`: a thread has registers for its weights of every type.
TILE = CtaTile(64, 64, 2, 2)
#: The most bytes of a plane that a thread has registers for.
MAX_RAW = 128


def widest(fmt: Format) -> int:
    """Bytes of the largest item of a type's planes."""
    return max(p.nbytes for p in fmt.planes)
