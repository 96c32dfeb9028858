"""Logits of a router that chooses at random, some experts more often than others: for measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128


@dataclass(frozen=True)
class SkewedLogits(KernelSpec):
    """Logits of which the largest ones are a random choice, by a hash of the row and its position.

    Expert e is chosen exp(-c) times as often as expert e - 1, so that the first half of them has a
    ``share`` (0.5 to below 1) of all choices: logits are -c e, and Gumbel noise. ``x`` is read as a
    router does it: what follows does not begin before it is there.
    """

    rows: int
    experts: int
    share: float

    name = "skewed_logits"

    def __post_init__(self) -> None:
        if not 0.5 <= self.share < 1 or not 1 <= self.experts <= MAX_EXPERTS:
            raise PtxgenError(
                f"skewed_logits: a share of {self.share} of {self.experts} experts: 0.5 to below 1"
            )
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"skewed_logits: {self.rows} rows: 1 to 65535")

    @property
    def slope(self) -> float:
        """How much lower the logits of an expert are than those of the one before."""
        odds = self.share / (1 - self.share)
        return 2 * math.log(odds) / self.experts

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("position", "u32", ("rows",), Access.IN),
            Param("x", "f32", (1,), Access.IN),
            Param("logits", "f32", ("rows", "experts"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.experts, THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Of two approximate logarithms, the inner one near 0."""
        return Tolerance(rtol=1e-4, atol=0.02)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        number = np.arange(self.experts, dtype=np.uint32)
        with np.errstate(over="ignore"):
            row = np.arange(self.rows, dtype=np.uint32) * np.uint32(0xC2B2AE3D)
            bits = (inputs["position"] * np.uint32(0x9E3779B1) + row)[:, None]
            bits = bits + number * np.uint32(0x85EBCA77)
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
                bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
        uniform = ((bits >> np.uint32(9)) + 0.5) * 2.0**-23
        logits = -np.log(-np.log(uniform)) - self.slope * number
        return {"logits": logits.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        position = rng.integers(0, 1 << 20, self.rows, np.uint32)
        return {"position": position, "x": np.ones(1, np.float32)}

    @classmethod
    def examples(cls) -> dict[str, SkewedLogits]:
        return {
            "alike": cls(1, 4, 0.5),
            "odd": cls(3, 61, 0.75),
            "several CTAs": cls(2, 300, 0.9),
        }

    def flops(self) -> int:
        return self.rows * self.experts * 10
