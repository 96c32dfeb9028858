"""Keep the last hidden states of sequences, for drafts that read the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.speculation.hidden_before import HeldVectors
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class HoldHidden(HeldVectors):
    """held[s, p % slots] = x[r] of each row r at p = position[r] of s = sequence[r]: of rows side
    by side, which are at positions one after the other, the last ``slots``."""

    name = "hold_hidden"
    params = (
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
        Param("x", "f32", ("rows", "cols"), Access.IN),
        Param("held", "f32", ("sequences", "slots", "cols"), Access.INOUT),
    )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        held = inputs["held"].copy()
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.max_len:  # later rows overwrite earlier ones
                held[inputs["sequence"][row], position % self.slots] = inputs["x"][row]
        return {"held": held}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        rows = self._random_rows(rng)
        return {p.name: rows[p.name] for p in self.params}

    @classmethod
    def examples(cls) -> dict[str, HoldHidden]:
        return {
            "one row": cls(cols=36, max_len=9, slots=4),
            "runs": cls(cols=132, max_len=40, slots=4, rows=33, sequences=5),
            "odd columns": cls(cols=37, max_len=20, slots=1, rows=17, sequences=4),
        }
