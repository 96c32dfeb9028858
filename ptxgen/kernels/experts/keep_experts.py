"""Experts chosen by tokens: logits of a router without those of others (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_USED
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

THREADS = 128
#: The logit of an expert that is not chosen: a score of 0, also as a sum of splits.
LEAST = -1e30


@dataclass(frozen=True)
class KeepExperts(KernelSpec):
    """The logits (splits, rows, experts) of experts that are not in the row of a ``table`` (tokens,
    used) for the row's token become -1e30; those of the others stay.

    The row's token is that of ``tokens`` (sequences, max_len) at its ``sequence`` and ``position``;
    a token beyond the table counts as its last one. A row with a position from ``max_len`` on is
    left as it is. The table has numbers of experts, as f32.
    """

    rows: int
    experts: int
    used: int
    known: int
    sequences: int
    max_len: int
    splits: int = 1

    name = "keep_experts"
    limits = limited(rows=POSITIVE_31_BITS, splits=GRID_ROWS, known=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.used <= min(MAX_USED, self.experts):
            raise PtxgenError(f"keep_experts: {self.used} of {self.experts} experts")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("logits", "f32", ("splits", "rows", "experts"), Access.INOUT),
            Param("table", "f32", ("known", "used"), Access.IN),
            Param("tokens", "u32", ("sequences", "max_len"), Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, self.splits, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits = inputs["logits"].copy()
        for row in np.flatnonzero(inputs["position"] < self.max_len):
            token = inputs["tokens"][inputs["sequence"][row], inputs["position"][row]]
            chosen = inputs["table"][min(int(token), self.known - 1)]
            others = np.setdiff1d(np.arange(self.experts), chosen)
            logits[:, row, others] = LEAST
        return {"logits": logits}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Tokens of the table and beyond it; the last of several rows is a padding row."""
        inputs = super().make_inputs(rng)
        table = [rng.permutation(self.experts)[: self.used] for _ in range(self.known)]
        position = rng.integers(0, self.max_len, self.rows)
        position[1:][-1:] = self.max_len + 5
        words = {
            "tokens": rng.integers(0, self.known + 3, (self.sequences, self.max_len)),
            "sequence": rng.integers(0, self.sequences, self.rows),
            "position": position,
        }
        inputs |= {name: of.astype(np.uint32) for name, of in words.items()}
        return inputs | {"table": np.array(table, np.float32)}

    @classmethod
    def examples(cls) -> dict[str, KeepExperts]:
        return {
            "a row": cls(1, 8, 2, 11, 1, 20),
            "rows": cls(4, 256, 6, 50, 3, 16),
            "splits": cls(3, 70, 4, 9, 2, 16, splits=3),
        }
