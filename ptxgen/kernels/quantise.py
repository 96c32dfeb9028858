"""Quantising at load: rows of floats to blocks of K-quants or Q8_0, by `weights.quantise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.quantise_kernel import SOURCES, QuantiseKernel
from urdir.ptxgen.spec import Access, LaunchShape, Param, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.quantise import STEPS


@dataclass(frozen=True)
class Quantise(QuantiseKernel):
    """Blocks of K-quants or Q8_0 (`QuantiseKernel`), which are made of groups alone: a thread has
    one."""

    name = "quantise"
    types = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
    launch_fields = frozenset({"rows", "cols"})
    cta_threads = 128

    @property
    def group(self) -> int:
        """Values of a thread."""
        return self.format.group

    @property
    def block_groups(self) -> int:
        """Groups of a block."""
        return self.format.block // self.group

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which a thread adds terms, so that each is added to the one half of the
        terms away."""
        digits = self.group.bit_length() - 1
        return tuple(int(f"{i:0{digits}b}"[::-1], 2) for i in range(self.group))

    @property
    def tried(self) -> tuple[float, ...]:
        """The codes that a group's span, or its largest value, gets with each scale that is
        tried."""
        if self.format.name == "Q6_K":
            return tuple(-32 - step for step in STEPS)
        most = 31 if self.format.name == "Q5_K" else 15
        return tuple(most + step for step in STEPS)

    @property
    def blocks(self) -> int:
        """Blocks of all rows."""
        return self.rows * self.cols // self.format.block

    @property
    def params(self) -> tuple[Param, ...]:
        count, fmt = self.rows * self.cols, self.format
        return (
            Param("source", "u8", (count * self.source.nbytes,), Access.IN),
            Param("y", "u8", (self.blocks * fmt.nbytes,), Access.OUT),
            Param("blocks", "u32"),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        threads = self.blocks * self.block_groups
        return LaunchShape(
            grid=(ceil_div(threads, self.cta_threads), 1, 1), block=(self.cta_threads, 1, 1)
        )

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return {**super().make_inputs(rng), "blocks": np.uint32(self.blocks)}

    @classmethod
    def examples(cls) -> dict[str, Quantise]:
        return {
            f"{name} of {source}": cls(FORMATS[name], FORMATS[source], 3, 5 * FORMATS[name].block)
            for name in cls.types
            for source in SOURCES
        }

    def flops(self) -> int:
        tried = 1 if self.format.name == "Q8_0" else 20 * len(self.tried)
        return (tried + 8) * self.rows * self.cols
