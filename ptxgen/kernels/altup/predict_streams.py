"""Predictions of several streams by each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.altup.streams import OfStreams
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class PredictStreams(OfStreams):
    """y<i> = x<i> + sum over j of coefs[i * streams + j] x<j>, with coefs of each row."""

    name = "predict_streams"

    @property
    def coefficients(self) -> int:
        """Coefficients of a row."""
        return self.streams**2

    @property
    def params(self) -> tuple[Param, ...]:
        coefs = Param("coefs", "f32", ("rows", "coefficients"), Access.IN)
        return (*self.of_streams("x", Access.IN), coefs, *self.of_streams("y", Access.OUT))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = np.stack([inputs[f"x{i}"].astype(np.float64) for i in range(self.streams)])
        coefs = inputs["coefs"].reshape(self.rows, self.streams, self.streams)
        y = x + np.einsum("rij,jrc->irc", coefs, x)
        return {f"y{i}": y[i].astype(np.float32) for i in range(self.streams)}

    @classmethod
    def examples(cls) -> dict[str, PredictStreams]:
        return {"a row": cls(1, 300), "rows": cls(3, 37), "two streams": cls(2, 130, 2)}
