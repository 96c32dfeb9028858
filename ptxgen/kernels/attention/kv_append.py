"""Appending the keys and values of a step's rows to a layer's KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class KvAppend(KernelSpec):
    """Writes row r of k and v to token ``position[r]`` of sequence ``sequence[r]`` in the caches.

    Rounding is the layout's. A position from ``max_len`` on is an idle row, which writes nothing.
    Rows must be different tokens, none of them in a page that sequences share.
    """

    layout: KvLayout
    rows: int = 1

    name = "kv_append"
    template = ("urdir.templates", "kv_append.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"KV append of {self.rows} rows: 1 to 65535")

    @property
    def kv_heads(self) -> int:
        """KV heads of the layout."""
        return self.layout.kv_heads

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.layout.head_dim

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("k", "f32", ("rows", "kv_heads", "head_dim"), Access.IN),
            Param("v", "f32", ("rows", "kv_heads", "head_dim"), Access.IN),
            # A few tokens of a cache are written, the others must survive: INOUT, not OUT.
            *self.layout.params(Access.INOUT),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def eights(self) -> int:
        """Groups of eight values in a head: one a thread."""
        return self.head_dim // 8

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.kv_heads, self.rows, 1), block=(32 * ceil_div(self.eights, 32), 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        caches = {}
        for name in ("k", "v"):
            cache = inputs[f"{name}_cache"].copy()
            for row, position in enumerate(inputs["position"].tolist()):
                if position < self.layout.max_len:
                    sequence = int(inputs["sequence"][row])
                    values = inputs[name][row][:, None]
                    table = inputs.get("block_table")
                    self.layout.write(cache, sequence, [position], values, table)
            caches[f"{name}_cache"] = cache
        return caches

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Different tokens of random sequences; with more than two rows, the second is idle."""
        inputs = super().make_inputs(rng)
        layout = self.layout
        if layout.is_paged:
            inputs["block_table"] = layout.random_table(rng)
        for name in ("k_cache", "v_cache"):
            inputs[name] = rng.integers(0, 100, layout.nbytes, np.uint8)
            inputs[name] = inputs[name].view(layout.numpy_dtype).reshape(layout.shape)
        tokens = rng.permutation(layout.sequences * layout.max_len)
        sequence, position = np.divmod(tokens, layout.max_len)
        if layout.is_paged:  # one token a slot, whatever the sequences share
            slots = [
                layout.slots_of(s, [p], inputs["block_table"])[0, 0]
                for s, p in zip(sequence, position, strict=True)
            ]
            first = np.sort(np.unique(slots, return_index=True)[1])
            sequence, position = sequence[first], position[first]
        position = np.concatenate([position, np.full(self.rows, layout.max_len)])[: self.rows]
        sequence = np.concatenate([sequence, np.zeros(self.rows, np.int64)])[: self.rows]
        if self.rows > 2:
            position[1] = layout.max_len + int(rng.integers(0, 2)) * 1000
        inputs["sequence"] = sequence.astype(np.uint32)
        inputs["position"] = position.astype(np.uint32)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, KvAppend]:
        return {
            "head_dim 8 f32": cls(KvLayout(1, 1, 1, 8, "f32")),
            "head_dim 80": cls(KvLayout(1, 3, 7, 80, "f16")),
            "head_dim 64 f32": cls(KvLayout(1, 2, 33, 64, "f32")),
            "head_dim 128": cls(KvLayout(1, 8, 16, 128, "f16")),
            "head_dim 256 rows": cls(KvLayout(3, 1, 5, 256, "f16"), rows=4),
            "bf16 rows": cls(KvLayout(2, 3, 9, 80, "bf16"), rows=3),
            "q8_0": cls(KvLayout(1, 1, 4, 32, "q8_0")),
            "q8_0 rows": cls(KvLayout(2, 2, 5, 96, "q8_0"), rows=5),
            "pages": cls(KvLayout(3, 2, 64, 72, "f16", page_len=16, pages=14), rows=5),
            "pages q8_0": cls(KvLayout(2, 2, 64, 160, "q8_0", page_len=32, pages=3), rows=4),
            "pages bf16": cls(KvLayout(4, 1, 32, 64, "bf16", page_len=16, pages=5), rows=7),
        }

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """k and v read, one token a row written to each cache."""
        values = self.rows * self.kv_heads * self.head_dim
        return 2 * (4 * values + self.rows * self.layout.token_nbytes)
