"""Corrections of several streams by what a layer made of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.altup.streams import OfStreams
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class CorrectStreams(OfStreams):
    """y<i> = x<i> + (coefs[i] + 1) (made - x0), with coefs of each row, and z = y0 * scale."""

    name = "correct_streams"

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.of_streams("x", Access.IN),
            Param("made", "f32", ("rows", "cols"), Access.IN),
            Param("coefs", "f32", ("rows", "streams"), Access.IN),
            Param("scale", "f32", ("cols",), Access.IN),
            *self.of_streams("y", Access.OUT),
            Param("z", "f32", ("rows", "cols"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = [inputs[f"x{i}"].astype(np.float64) for i in range(self.streams)]
        change, found = inputs["made"] - x[0], {}
        for i, weight in enumerate(inputs["coefs"].astype(np.float64).T + 1.0):
            found[f"y{i}"] = x[i] + weight[:, None] * change
        found["z"] = found["y0"] * inputs["scale"]
        return {name: values.astype(np.float32) for name, values in found.items()}

    @classmethod
    def examples(cls) -> dict[str, CorrectStreams]:
        return {"a row": cls(1, 300), "rows": cls(3, 37), "two streams": cls(2, 130, 2)}
