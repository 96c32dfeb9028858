"""Logits of a router that chooses what a list says, token by token: for measuring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS, MAX_USED
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class ListedLogits(KernelSpec):
    """Logits of which the largest ones are those of the ``used`` experts of a list's token.

    Row b has the token (``position`` + `tokens_apart` b) modulo ``tokens``, a power of two; its
    experts are those of the list plus `experts_apart` b, modulo ``experts``. The first of them has
    the highest logit, 9; all others of the layer have 0. ``x`` is read as a router does it: what
    follows does not begin before it is there.
    """

    rows: int
    experts: int
    used: int
    tokens: int

    name = "listed_logits"
    #: How many tokens further in the list a row begins than the one before, and by how much the
    #: numbers of its experts are turned: rows are in different places, and have different experts.
    tokens_apart, experts_apart = 1021, 37

    def __post_init__(self) -> None:
        if not 1 <= self.used <= min(self.experts, MAX_USED) or self.experts > MAX_EXPERTS:
            raise PtxgenError(
                f"listed_logits: {self.used} of {self.experts} experts: up to {MAX_USED} of "
                f"{MAX_EXPERTS}"
            )
        if self.tokens < 1 or self.tokens & (self.tokens - 1):
            raise PtxgenError(f"listed_logits: {self.tokens} tokens: a power of two")
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"listed_logits: {self.rows} rows: 1 to 65535")

    def logit(self, place: int) -> float:
        """The logit of a listed expert."""
        return 9 - place / self.used

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("position", "u32", ("rows",), Access.IN),
            Param("choices", "u32", ("tokens", "used"), Access.IN),
            Param("x", "f32", (1,), Access.IN),
            Param("logits", "f32", ("rows", "experts"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (ceil_div(self.experts, THREADS), self.rows, 1)
        return LaunchShape(grid=grid, block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        row = np.arange(self.rows)
        token = (inputs["position"].astype(np.int64) + self.tokens_apart * row) % self.tokens
        expert = (inputs["choices"][token] + self.experts_apart * row[:, None]) % self.experts
        logits = np.zeros((self.rows, self.experts), np.float32)
        values = [[self.logit(place) for place in range(self.used)]]
        np.put_along_axis(logits, expert, np.array(values, np.float32), axis=1)
        return {"logits": logits}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        choices = np.argsort(rng.random((self.tokens, self.experts)))[:, : self.used]
        position = rng.integers(0, 1 << 20, self.rows, np.uint32)
        x = np.ones(1, np.float32)
        return {"position": position, "choices": choices.astype(np.uint32), "x": x}

    @classmethod
    def examples(cls) -> dict[str, ListedLogits]:
        return {
            "one": cls(1, 1, 1, 1),
            "odd": cls(3, 61, 5, 16),
            "several CTAs": cls(7, 300, 8, 64),
        }

    def flops(self) -> int:
        return self.rows * self.experts
