"""The highest logits of rows and their tokens: the candidates that a selector chooses among."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.speculation.highest import HighestLogits
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class TopTokens(HighestLogits):
    """The ``most`` highest logits of each row, the highest first (of equal ones the lowest token
    first), in ``values`` (rows, most) f32, and their ``tokens`` u32.

    Where there are fewer, the others are token 0 with -inf; so are all of a row in which no token
    can be chosen (NaN, +inf, -inf alone). ``numbers`` (rows, most) u32 count from 0: rows of a
    table are taken by them.
    """

    n: int
    rows: int = 1
    most: int = 16

    name = "top_tokens"

    @property
    def params(self) -> tuple[Param, ...]:
        shape = ("rows", "most")
        return (
            *self.inputs,
            Param("tokens", "u32", shape, Access.OUT),
            Param("values", "f32", shape, Access.OUT),
            Param("numbers", "u32", shape, Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        tokens = np.zeros((self.rows, self.most), np.uint32)
        values = np.full((self.rows, self.most), -np.inf, np.float32)
        for row, logits in enumerate(inputs["logits"]):
            if np.isnan(logits).any() or not np.isfinite(logits.max()):
                continue
            order = np.argsort(-logits, kind="stable")[: self.most]
            tokens[row, : len(order)], values[row, : len(order)] = order, logits[order]
        numbers = np.arange(self.rows * self.most, dtype=np.uint32).reshape(tokens.shape)
        return {"tokens": tokens, "values": values, "numbers": numbers}

    @classmethod
    def examples(cls) -> dict[str, TopTokens]:
        return {
            "one logit": cls(n=1, most=2),
            "fewer than the most": cls(n=7, rows=5),
            "a few slices": cls(n=3001, rows=6, most=4),
            "large vocabulary": cls(n=248_320, rows=2),
        }
