"""Appending the keys and values of a step's rows to a layer's KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import V_NORM, OwnToken
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import (
    Access,
    Array,
    KernelSpec,
    LaunchShape,
    Param,
    Tolerance,
    ceil_div,
)


@dataclass(frozen=True)
class KvAppend(KernelSpec):
    """Writes row r of k and v to token ``position[r]`` of sequence ``sequence[r]`` in the caches.

    Rounding is the layout's. A position from ``max_len`` on is an idle row, which writes nothing.
    Rows must be different tokens (in a ring: of different slots), none of them in a page that
    sequences share. With a ``v_norm``, an RMS norm without weight, heads of v are normed before.
    """

    layout: KvLayout
    rows: int = 1
    v_norm: Norm | None = None

    name = "kv_append"
    template = ("urdir.templates", "kv_append.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"KV append of {self.rows} rows: 1 to 65535")
        _ = self.token

    @property
    def token(self) -> OwnToken:
        """What is done to a token before it is stored."""
        return OwnToken(v_norm=self.v_norm)

    @property
    def kv_heads(self) -> int:
        """KV heads of the layout."""
        return self.layout.kv_heads

    @property
    def head_dim(self) -> int:
        """Values of a head of K."""
        return self.layout.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head of V."""
        return self.layout.values_per_head

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("k", "f32", ("rows", "kv_heads", "head_dim"), Access.IN),
            Param("v", "f32", ("rows", "kv_heads", "value_dim"), Access.IN),
            # A few tokens of a cache are written, the others must survive: INOUT, not OUT.
            *self.layout.params(Access.INOUT),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def eights(self) -> dict[str, int]:
        """Groups of eight values in a head of "k" and of "v": one of each a thread."""
        return {"k": self.head_dim // 8, "v": self.value_dim // 8}

    @property
    def launch_shape(self) -> LaunchShape:
        warps = ceil_div(max(self.eights.values()), 32)
        return LaunchShape(grid=(self.kv_heads, self.rows, 1), block=(32 * warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # values are exact but for the factor of a norm: rsqrt.approx, 2^-22.4 relative
        return Tolerance(rtol=1e-6) if self.v_norm else Tolerance()

    def reference(self, **inputs: Any) -> dict[str, Array]:
        caches = {}
        for name, layout in (("k", self.layout), ("v", self.layout.values)):
            cache = inputs[f"{name}_cache"].copy()
            for row, position in enumerate(inputs["position"].tolist()):
                if position < self.layout.max_len:
                    sequence = int(inputs["sequence"][row])
                    values = self.token.prepared(name, inputs[name][row], position, inputs)
                    table = inputs.get("block_table")
                    layout.write(cache, sequence, [position], values[:, None], table)
            caches[f"{name}_cache"] = cache
        return caches

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Different tokens of random sequences; with more than two rows, the second is idle."""
        inputs = super().make_inputs(rng)
        layout = self.layout
        if layout.is_paged:
            inputs["block_table"] = layout.random_table(rng)
        for name, cache in layout.caches.items():
            inputs[name] = rng.integers(0, 100, cache.nbytes, np.uint8)
            inputs[name] = inputs[name].view(cache.numpy_dtype).reshape(cache.shape)
        if self.v_norm:  # what the cache holds exactly: no error of the norm decides a rounding
            for row, token in enumerate(inputs["v"]):
                stored = layout.values.rounded(token)
                inputs["v"][row] = self.token.origin_of("v", stored, 0, inputs)
        tokens = rng.permutation(layout.sequences * layout.max_len)
        sequence, position = np.divmod(tokens, layout.max_len)
        if layout.is_paged or layout.capacity:  # one token a slot, whatever the sequences share
            table = inputs.get("block_table")
            slots = [
                layout.slots_of(s, [p], table)[0, 0]
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
            "value_dim 128": cls(KvLayout(2, 2, 9, 192, "f16", value_dim=128), rows=3),
            "q8_0 value_dim 320": cls(KvLayout(1, 2, 9, 64, "q8_0", value_dim=320), rows=2),
            "head_dim 512": cls(KvLayout(1, 1, 5, 512, "bf16", value_dim=264), rows=2),
            "ring": cls(KvLayout(2, 1, 40, 64, "f16", capacity=8), rows=7),
            "pages ring": cls(KvLayout(3, 2, 96, 64, "f16", 16, 7, capacity=32), rows=5),
            "v_norm": cls(KvLayout(2, 2, 9, 80, "f16"), rows=3, v_norm=V_NORM),
            "v_norm q8_0 head_dim 512": cls(KvLayout(1, 2, 9, 512, "q8_0"), 2, v_norm=V_NORM),
            "v_norm f32 value_dim 24": cls(
                KvLayout(1, 3, 9, 16, "f32", value_dim=24), rows=2, v_norm=V_NORM
            ),
            "pages bf16": cls(KvLayout(4, 1, 32, 64, "bf16", page_len=16, pages=5), rows=7),
        }

    def flops(self) -> int:
        return 3 * self.rows * self.kv_heads * self.value_dim if self.v_norm else 0

    def bytes_moved(self) -> int:
        """k and v read, one token a row written to each cache."""
        values = self.rows * self.kv_heads * (self.head_dim + self.value_dim)
        return 4 * values + self.rows * self.layout.pair_nbytes
