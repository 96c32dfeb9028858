"""Logits of a router that the launch before has left in parts (`RouterParts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.spec import Access, Array, Param

#: Experts of a router whose logits a warp adds up, as many in each lane.
TAKEN = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class LogitParts:
    """Logits of one row: the sum of ``count`` parts, ``logit_parts`` (count, experts) f32; after an
    RMSNorm over ``cols`` columns with ``eps`` (None: no norm) divided by its root mean square, from
    ``square_parts`` (count,) f32; times ``scale``, plus a ``router_bias`` (experts,) f32."""

    count: int
    cols: int
    eps: float | None = None
    bias: bool = False
    scale: float = 1.0

    def params(self, experts: int) -> tuple[Param, ...]:
        """What a launch takes in place of logits."""
        return Param.given(
            Param("logit_parts", "f32", (self.count, experts), Access.IN),
            self.eps is not None and Param("square_parts", "f32", (self.count,), Access.IN),
            self.bias and Param("router_bias", "f32", (experts,), Access.IN),
        )

    def logits(self, inputs: Mapping[str, Any]) -> Array:
        """The logits (1, experts), f64."""
        logits: Array = self.scale * inputs["logit_parts"].astype(np.float64).sum(axis=0)
        if self.eps is not None:
            squares = inputs["square_parts"].astype(np.float64).sum()
            logits = logits / np.sqrt(squares / self.cols + self.eps)
        if self.bias:
            logits = logits + inputs["router_bias"]
        return logits[None]

    def make_inputs(self, experts: int, rng: np.random.Generator) -> dict[str, Any]:
        """Parts whose sums are about as large as logits are."""
        parts = 2.0 * rng.standard_normal((self.count, experts)) / self.count**0.5
        made = {"logit_parts": parts.astype(np.float32)}
        if self.eps is not None:
            squares = rng.uniform(0.5, 1.5, self.count) * self.cols / self.count
            made["square_parts"] = squares.astype(np.float32)
        return made
