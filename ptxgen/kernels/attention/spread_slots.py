"""Slots of selected tokens for each KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.select_keys import NO_POSITION
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class SpreadSlots(KernelSpec):
    """Selected tokens of rows as those of ``heads`` rows each, one for a KV head, whose slots lie
    ``apart``: spread[r * heads + h] (width) = slots[r] + h * apart, spread_last[r * heads + h] =
    last[r], and spread_row[r * heads + h] is that row's number (`KvLayout.chosen`)."""

    rows: int
    width: int
    heads: int
    apart: int

    name = "spread_slots"
    limits = limited(rows=POSITIVE, width=POSITIVE, heads=POSITIVE, apart=POSITIVE)
    params = (
        Param("slots", "u32", ("rows", "width"), Access.IN),
        Param("last", "u32", ("rows",), Access.IN),
        Param("spread", "u32", ("spread_rows", "width"), Access.OUT),
        Param("spread_last", "u32", ("spread_rows",), Access.OUT),
        Param("spread_row", "u32", ("spread_rows",), Access.OUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows * self.heads not in GRID_ROWS:
            raise PtxgenError(f"spread_slots: {self.rows} rows of {self.heads} heads")

    @property
    def spread_rows(self) -> int:
        """Rows of all heads."""
        return self.rows * self.heads

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.width, THREADS), self.spread_rows, 1), block=(THREADS, 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        first = np.arange(self.heads, dtype=np.uint32) * np.uint32(self.apart)
        spread = inputs["slots"][:, None] + first[:, None]
        return {
            "spread": spread.reshape(-1, self.width),
            "spread_last": np.repeat(inputs["last"], self.heads),
            "spread_row": np.arange(self.spread_rows, dtype=np.uint32),
        }

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last of several rows is a padding row."""
        last = rng.integers(0, self.width, self.rows).astype(np.uint32)
        if self.rows > 1:
            last[-1] = NO_POSITION
        slots = rng.integers(0, 1 << 20, (self.rows, self.width)).astype(np.uint32)
        return {"slots": slots, "last": last}

    @classmethod
    def examples(cls) -> dict[str, SpreadSlots]:
        return {"few": cls(3, 7, 2, 16), "many": cls(2, 300, 4, 64)}
