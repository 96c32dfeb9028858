"""The token embedding: one row of a repacked table of any weight type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class Embedding(KernelSpec):
    """Row tokens[position] of an embedding table, as f32, to the bit.

    A position or a token that is out of range reads nothing and gives NaNs: the host checks
    tokens where it takes them.
    """

    format: Format
    vocab: int
    cols: int
    max_len: int

    name = "embedding"
    template = ("urdir.templates", "embedding.ptx.j2")

    @cached_property
    def layout(self) -> Layout:
        """How the table lies in memory: as any weight matrix, so that it can be tied."""
        return Layout(self.format, self.vocab, self.cols)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("weights", "u8", ("weight_nbytes",), Access.IN),
            Param("tokens", "u32", ("max_len",), Access.IN),
            Param("position", "u32", (1,), Access.IN),
            Param("y", "f32", ("cols",), Access.OUT),
        )

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the repacked table."""
        return self.layout.nbytes

    @property
    def launch_shape(self) -> LaunchShape:
        threads = 32 * min(4, ceil_div(self.layout.row_units, 32))
        grid = ceil_div(self.layout.row_units, threads)
        return LaunchShape(grid=(grid, 1, 1), block=(threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        position = int(inputs["position"][0])
        token = int(inputs["tokens"][position]) if position < self.max_len else self.vocab
        if token >= self.vocab:
            return {"y": np.full(self.cols, np.nan, np.float32)}
        return {"y": self.layout.unpack(inputs["weights"])[token]}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        blocks = random_blocks(self.format, self.vocab * self.cols // self.format.block, rng)
        return {
            "weights": self.layout.pack(blocks),
            "tokens": rng.integers(0, self.vocab, self.max_len).astype(np.uint32),
            "position": rng.integers(0, self.max_len, 1).astype(np.uint32),
        }

    @classmethod
    def examples(cls) -> Sequence[Embedding]:
        cols = {f: 37 if f.is_float else f.block * 9 % 1536 for f in FORMATS.values()}
        each = [cls(f, vocab=5, cols=n, max_len=7) for f, n in cols.items()]
        return (*each, cls(FORMATS["Q8_0"], vocab=3, cols=4896, max_len=2))

    def flops(self) -> int:
        return 2 * self.cols

    def bytes_moved(self) -> int:
        row = self.cols // self.format.block * self.format.nbytes
        return row + 8 + 4 * self.cols
