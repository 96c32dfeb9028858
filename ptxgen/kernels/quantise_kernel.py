"""What kernels that quantise at load have in common: rows of floats to blocks of a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Array, KernelSpec
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.quantise import QUANTISERS

#: The types of sources.
SOURCES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class QuantiseKernel(KernelSpec):
    """Blocks of ``format``, one of ``types``, of (rows, cols) values of the type ``source``, a
    multiple of blocks. Equal to `QUANTISERS` bit for bit, where values are finite."""

    format: Format
    source: Format
    rows: int
    cols: int

    types: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        if self.format.name not in self.types or self.source.name not in SOURCES:
            raise PtxgenError(
                f"{self.name}: {self.format.name} of {self.source.name}: {', '.join(self.types)} "
                f"of {', '.join(SOURCES)}"
            )
        _ = Layout(self.format, self.rows, self.cols)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        values = Layout(self.source, self.rows, self.cols)
        rows = values.unpack(values.pack(inputs["source"]))
        return {"y": QUANTISERS[self.format.name](rows).reshape(-1)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return {"source": unlike_values(self.rows * self.cols, self.source, rng)}


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
