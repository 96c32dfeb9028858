"""Flash decoding: the merging of the chunks of a row's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.spec import LOG2E, MAX_HEAD_DIM, SINKS, with_sinks
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance

#: The most chunks of a row: their maxima and sums are in the reduction's shared memory.
MAX_CHUNKS = 2048


@dataclass(frozen=True)
class FlashDecodeReduce(KernelSpec):
    """Merges the chunks of FlashDecodeChunk: the rows' attention, zeros for idle rows.

    out[r, h] = sum_i 2^(m_i - m) v_i / sum_i 2^(m_i - m) s_i over chunks i with maximum m_i, sum
    of weights s_i and sum of weighted values v_i; m is the largest m_i. A chunk whose maximum is
    -infinity is empty: its values are not read. ``head_dim`` is that of V. Sinks take part as
    `Scores` says.
    """

    heads: int
    head_dim: int
    chunks: int
    rows: int = 1
    sinks: bool = False

    name = "flash_decode_reduce"
    template = ("urdir.templates", "flash_decode_reduce.ptx.j2")

    warps = 8

    def __post_init__(self) -> None:
        if not 8 <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            raise PtxgenError(
                f"head_dim {self.head_dim} must be a multiple of 8 in 8..{MAX_HEAD_DIM}"
            )
        if self.heads < 1 or not 1 <= self.rows <= 65535:
            raise PtxgenError(f"attention of {self.heads} heads, {self.rows} rows (1 to 65535)")
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise PtxgenError(f"{self.chunks} chunks: 1 to {MAX_CHUNKS}")

    @property
    def log2e(self) -> float:
        """From a logit to the exponent of 2."""
        return LOG2E

    @property
    def vectors(self) -> int:
        """Groups of four values in a head: one to four a lane."""
        return self.head_dim // 4

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("partial", "f32", ("rows", "heads", "chunks", "head_dim"), Access.IN),
            Param("softmax", "f32", ("rows", "heads", "chunks", 2), Access.IN),
            *((SINKS,) if self.sinks else ()),
            Param("out", "f32", ("rows", "heads", "head_dim"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.heads, self.rows, 1), block=(32 * self.warps, 1, 1), prefers_shared=True
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        maximum, total = np.moveaxis(inputs["softmax"].astype(np.float64), -1, 0)
        empty = np.isneginf(maximum)
        idle = empty.all(axis=2)
        top = np.where(idle, 0.0, maximum.max(axis=2))
        weights = np.exp2(maximum - top[:, :, None])
        values = np.where(empty[..., None], 0.0, inputs["partial"].astype(np.float64))
        out = np.einsum("rhc,rhcd->rhd", weights, values)
        total = (weights * total).sum(axis=2)
        if self.sinks:
            total, out = with_sinks(inputs["sinks"], top, total, out)
        total = np.where(idle, 1.0, total)
        return {"out": (out / total[:, :, None]).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows whose last chunks are empty, their values NaN; of several rows, one is idle."""
        inputs = super().make_inputs(rng)
        softmax = inputs["softmax"]
        softmax[..., 0] *= 5
        softmax[..., 1] = 1 + np.abs(softmax[..., 1])
        for row in range(self.rows):
            filled = int(rng.integers(1, self.chunks + 1)) if row or self.rows == 1 else 0
            softmax[row, :, filled:] = (-np.inf, 0)
            inputs["partial"][row, :, filled:] = np.nan
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, FlashDecodeReduce]:
        return {
            "one chunk": cls(heads=1, head_dim=8, chunks=1),
            "nine chunks": cls(heads=3, head_dim=80, chunks=9),
            "64 chunks": cls(heads=4, head_dim=128, chunks=64),
            "rows": cls(heads=2, head_dim=256, chunks=37, rows=3),
            "sinks": cls(heads=3, head_dim=64, chunks=5, rows=2, sinks=True),
            "head_dim 512 sinks": cls(heads=1, head_dim=512, chunks=11, sinks=True),
            "head_dim 360": cls(heads=2, head_dim=360, chunks=3, rows=2),
            "many chunks": cls(heads=5, head_dim=144, chunks=300, rows=2),
        }

    def flops(self) -> int:
        return self.rows * self.heads * self.chunks * 2 * (self.head_dim + 2)
