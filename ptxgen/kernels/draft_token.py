"""The token that a draft proposes: the highest rank of a row, by the draft's own vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.argmax import INVALID_RANK, indices, ranks
from urdir.ptxgen.limits import GRID_ROWS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param


@dataclass(frozen=True)
class DraftToken(KernelSpec):
    """tokens[r, column] = the index of the highest of ranks[r], as Argmax leaves them (rows,
    slices).

    A draft of ``mapped`` tokens (0: those of the model) has a ``map`` (mapped,) u32 from its own
    ids to the model's. INVALID_TOKEN (no choice) and an index beyond the map stay unchanged. Other
    columns of ``tokens`` (rows, columns) u32 stay as they are.
    """

    slices: int
    columns: int
    column: int
    rows: int = 1
    mapped: int = 0

    name = "draft_token"
    limits = limited(slices=up_to(1024), rows=GRID_ROWS, mapped=range(1 << 31))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.column < self.columns:
            raise PtxgenError(f"draft_token: column {self.column} of {self.columns}")

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("ranks", "u64", ("rows", "slices"), Access.IN),
            self.mapped and Param("map", "u32", ("mapped",), Access.IN),
            Param("tokens", "u32", ("rows", "columns"), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        tokens, chosen = inputs["tokens"].copy(), indices(inputs["ranks"].max(axis=1))
        if self.mapped:
            inside = chosen < self.mapped
            chosen[inside] = inputs["map"][chosen[inside]]
        tokens[:, self.column] = chosen
        return {"tokens": tokens}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Ranks of equal logits among others, and rows without a choice."""
        shape = (self.rows, self.slices)
        logits = rng.integers(-3, 3, shape).astype(np.float32)
        most = self.mapped or 1000
        of = rng.integers(0, most, shape).astype(np.uint32)
        found = ranks(logits, of)
        if self.rows > 1:
            found[-1, 0] = INVALID_RANK
        own = {"map": rng.integers(0, 5000, self.mapped, np.uint32)} if self.mapped else {}
        tokens = rng.integers(0, 1000, (self.rows, self.columns), np.uint32)
        return {"ranks": found, **own, "tokens": tokens}

    @classmethod
    def examples(cls) -> dict[str, DraftToken]:
        return {
            "one slice": cls(slices=1, columns=2, column=1),
            "a few slices": cls(slices=5, columns=4, column=2, rows=3),
            "mapped": cls(slices=32, columns=4, column=3, rows=5, mapped=32_000),
            "many slices": cls(slices=251, columns=8, column=0, rows=2),
        }

    def bytes_moved(self) -> int:
        """A row's ranks, its place in the map and its token."""
        return self.rows * (8 * self.slices + (8 if self.mapped else 4))
