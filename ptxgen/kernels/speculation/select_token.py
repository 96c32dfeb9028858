"""A token among candidates, by what the token before it and a hidden state make of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.argmax import INVALID_RANK, ranks
from urdir.ptxgen.limits import GRID_ROWS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div


@dataclass(frozen=True)
class SelectToken(KernelSpec):
    """ranks[r] = the rank of the highest of scores[r, j] = scores[r, j] + successors[r, j] .
    (previous[r] * state[r]), at tokens[r, j], of ``most`` candidates j; of equal scores the lowest
    token.

    ``scores`` (rows, most) f32 are the candidates' logits at first, ``previous`` and ``state``
    (rows, rank) and ``successors`` (rows, most, rank) f32. Scores that are no numbers are never the
    highest; of a row without others the rank is that of no token. With ``judged`` the softmax of
    the scores at the highest is its ``probability`` (rows,) f32, 0 without one.
    """

    rank: int
    most: int
    rows: int = 1
    judged: bool = False

    name = "select_token"
    limits = limited(rank=up_to(1024), most=up_to(32), rows=GRID_ROWS)

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("previous", "f32", ("rows", "rank"), Access.IN),
            Param("state", "f32", ("rows", "rank"), Access.IN),
            Param("successors", "f32", ("rows", "most", "rank"), Access.IN),
            Param("tokens", "u32", ("rows", "most"), Access.IN),
            Param("scores", "f32", ("rows", "most"), Access.INOUT),
            Param("ranks", "u64", ("rows",), Access.OUT),
            self.judged and Param("probability", "f32", ("rows",), Access.OUT),
        )

    @property
    def loads(self) -> int:
        """Values of a vector that a lane looks at."""
        return ceil_div(self.rank, 32)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """A sum of as many products of three numbers as a vector is long."""
        return Tolerance(rtol=Tolerance.of_sum("f32", self.rank).rtol, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = inputs["previous"].astype(np.float64) * inputs["state"]
        added = np.einsum("rk,rjk->rj", weights, inputs["successors"].astype(np.float64))
        scores = inputs["scores"] + added
        best = np.full(self.rows, INVALID_RANK)
        probability = np.zeros(self.rows, np.float32)
        for row, (score, token) in enumerate(zip(scores, inputs["tokens"], strict=True)):
            if not (valid := np.isfinite(score)).any():
                continue
            highest = score[valid].max()
            chosen = token[valid & (score == highest)].min()
            best[row] = ranks(np.array(highest), np.array(chosen))
            probability[row] = 1 / np.exp(score[valid] - highest).sum()
        found = {"scores": scores.astype(np.float32), "ranks": best}
        return {**found, "probability": probability} if self.judged else found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Numbers of few bits, so that sums are exact and ranks are equal; some scores are equal,
        some -inf, of one row all."""
        shapes: dict[str, tuple[int, ...]]
        shapes = {"previous": (self.rows, self.rank), "state": (self.rows, self.rank)}
        shapes["successors"] = (self.rows, self.most, self.rank)
        made = {name: _few_bits(rng, of) for name, of in shapes.items()}
        tokens = [rng.permutation(4 * self.most)[: self.most] for _ in range(self.rows)]
        scores = _few_bits(rng, (self.rows, self.most))
        scores[rng.random(scores.shape) < 0.1] = -np.inf
        if self.rows > 2:
            scores[1] = -np.inf
        return {**made, "tokens": np.array(tokens, np.uint32), "scores": scores}

    @classmethod
    def examples(cls) -> dict[str, SelectToken]:
        return {
            "one": cls(1, 1),
            "a short vector": cls(31, 4, rows=3, judged=True),
            "candidates of rows": cls(256, 16, rows=5),
            "as many as there may be": cls(100, 32, rows=4, judged=True),
        }

    def flops(self) -> int:
        return 2 * self.rows * self.most * self.rank


def _few_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    values: Array = (rng.integers(-3, 4, shape) / 4).astype(np.float32)
    return values
