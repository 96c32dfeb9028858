"""The highest logits of rows, which those of slices lead to."""

from __future__ import annotations

from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.spec import Access, KernelSpec, LaunchShape, Param, ceil_div


class HighestLogits(KernelSpec):
    """What kernels for the ``most`` highest of ``n`` logits of each row have in common: their
    inputs, and what a lane looks at.

    ``ranks`` (rows, slices) u64 are those of the ``logits`` (rows, n) f32 as `Argmax` leaves them.
    """

    n: int
    rows: int
    most: int

    def __post_init__(self) -> None:
        Argmax(n=self.n, rows=self.rows)
        if not 1 <= self.most <= 32 or self.slices > 1024:
            raise PtxgenError(
                f"{self.name}: {self.most} of {self.n} logits: expected 1 to 32, and at most "
                f"1024 slices of {self.width}"
            )

    @property
    def inputs(self) -> tuple[Param, ...]:
        """Logits and ranks."""
        return (
            Param("logits", "f32", ("rows", "n"), Access.IN),
            Param("ranks", "u64", ("rows", "slices"), Access.IN),
        )

    @property
    def width(self) -> int:
        """Logits of a slice."""
        return Argmax(n=self.n).width

    @property
    def slices(self) -> int:
        """Slices of a row."""
        return Argmax(n=self.n).slices

    @property
    def warps(self) -> int:
        """Slices that may have one of the highest logits, a warp each."""
        return min(self.most, self.slices)

    @property
    def rank_loads(self) -> int:
        """Ranks of slices that a lane looks at."""
        return ceil_div(self.slices, 32)

    @property
    def candidate_loads(self) -> int:
        """Highest ranks of these slices that a lane looks at."""
        return ceil_div(self.warps * self.most, 32)

    @property
    def held(self) -> int:
        """Ranks that a lane holds."""
        return max(self.width // 32, self.rank_loads, self.candidate_loads)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(1, self.rows, 1), block=(32 * self.warps, 1, 1))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Logits of any spread, equal ones among them; a row with a few that are not -inf, one with
        a NaN, and one of -inf alone."""
        spread = rng.choice([0.1, 1.0, 10.0], (self.rows, 1))
        logits = (spread * rng.standard_normal((self.rows, self.n))).astype(np.float32)
        logits[rng.random(self.rows) < 0.3] = np.round(logits[0] * 4) / 4
        if self.rows > 3:
            some = rng.permutation(self.n)[: self.n - 5]
            logits[1, some] = -np.inf
            logits[2, rng.integers(self.n)] = rng.choice([np.nan, np.inf])
            logits[3] = -np.inf
        ranks = Argmax(n=self.n, rows=self.rows).reference(logits=logits)["ranks"]
        return {"logits": logits, "ranks": ranks}

    def flops(self) -> int:
        return self.rows * self.most

    def bytes_moved(self) -> int:
        """Ranks of all slices, and the logits of the highest ones."""
        return self.rows * (8 * self.slices + 4 * min(self.n, self.warps * self.width))
