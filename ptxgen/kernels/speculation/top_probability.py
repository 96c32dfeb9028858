"""How likely a draft's token is by the draft itself: a softmax over the highest logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.speculation.highest import HighestLogits
from urdir.ptxgen.spec import Access, Array, Param, Tolerance


@dataclass(frozen=True)
class TopProbability(HighestLogits):
    """probability[r] = 1 / sum(exp(l - highest)) over the ``most`` highest logits l of row r: what
    the softmax of these alone, as llama.cpp takes it of 10, gives the highest one.

    A row in which no token can be chosen (NaN, +inf, -inf alone) has 0.
    """

    n: int
    rows: int = 1
    most: int = 10

    name = "top_probability"
    #: A sum of a few approximate exponentials, f32.
    tolerance = Tolerance(atol=1e-6, rtol=1e-5)

    @property
    def params(self) -> tuple[Param, ...]:
        return (*self.inputs, Param("probability", "f32", ("rows",), Access.OUT))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        probability = np.zeros(self.rows, np.float32)
        for row, logits in enumerate(inputs["logits"].astype(np.float64)):
            if np.isnan(logits).any() or not np.isfinite(logits.max()):
                continue
            highest = np.sort(logits)[-self.most :]
            probability[row] = 1 / np.exp(highest - highest[-1]).sum()
        return {"probability": probability}

    @classmethod
    def examples(cls) -> dict[str, TopProbability]:
        return {
            "one logit": cls(n=1),
            "fewer than the most": cls(n=7, rows=5),
            "a few slices": cls(n=3001, rows=6),
            "large vocabulary": cls(n=128_256, rows=4),
            "many slices": cls(n=262_144, rows=2, most=3),
        }
