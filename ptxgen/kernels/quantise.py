"""Quantising at load: rows of floats to blocks of K-quants or Q8_0, by `weights.quantise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.quantise import QUANTISERS, STEPS

#: The types that are made of groups alone; `QuantiseRows` makes those with a scale a row.
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
#: The types of sources.
SOURCES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Quantise(KernelSpec):
    """Blocks of ``format`` of (rows, cols) values of the type ``source``, a multiple of blocks.

    Equal to `QUANTISERS` bit for bit, where values are finite. A thread has a group.
    """

    format: Format
    source: Format
    rows: int
    cols: int

    name = "quantise"
    launch_fields = frozenset({"rows", "cols"})
    cta_threads = 128

    def __post_init__(self) -> None:
        check(self.name, self.format, self.source, TYPES)
        _ = Layout(self.format, self.rows, self.cols)

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

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values = Layout(self.source, self.rows, self.cols)
        rows = values.unpack(values.pack(inputs["source"]))
        return {"y": QUANTISERS[self.format.name](rows).reshape(-1)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        values = unlike_values(self.rows * self.cols, self.source, rng)
        return {"source": values, "blocks": np.uint32(self.blocks)}

    @classmethod
    def examples(cls) -> dict[str, Quantise]:
        return {
            f"{name} of {source}": cls(FORMATS[name], FORMATS[source], 3, 5 * FORMATS[name].block)
            for name in TYPES
            for source in SOURCES
        }

    def flops(self) -> int:
        tried = 1 if self.format.name == "Q8_0" else 20 * len(self.tried)
        return (tried + 8) * self.rows * self.cols


def check(name: str, fmt: Format, source: Format, types: tuple[str, ...]) -> None:
    """Raise PtxgenError for other types."""
    if fmt.name not in types or source.name not in SOURCES:
        raise PtxgenError(
            f"{name}: {fmt.name} of {source.name}: {', '.join(types)} of {', '.join(SOURCES)}"
        )


def unlike_values(count: int, source: Format, rng: np.random.Generator) -> Array:
    """Bytes of values of unlike size, a multiple of 32: some groups are zeros, or are equal
    values, or have one sign."""
    values = rng.standard_normal((count // 32, 32)) * np.exp(rng.standard_normal((count // 32, 1)))
    kinds = rng.integers(0, 16, len(values))
    values[kinds == 0] = 0
    values[kinds == 1] = -0.25
    values[kinds == 2] = np.abs(values[kinds == 2])
    values[kinds == 3, ::3] = 0
    values[kinds == 4] *= 1e-6
    values[: 8 * (len(values) > 16)] = 0
    flat = values.astype(np.float32).reshape(-1)
    if source.element == "bf16":
        return (flat.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return flat.astype(np.float16 if source.element == "f16" else np.float32).view(np.uint8)
