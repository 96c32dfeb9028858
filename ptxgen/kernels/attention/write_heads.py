"""Keys and values of heads, which products have made in parts, as a cache that attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class WriteHeads(KernelSpec):
    """k_cache[h, t] = (head[t], still[t, h]), v_cache[h, t] = v[t, h], of all tokens t of a
    contiguous f16 cache of one sequence: all heads have the first ``split`` values of a key.

    head (max_len, split), still (max_len, kv_heads, head_dim - split) and v (max_len, kv_heads,
    value_dim) are f32.
    """

    layout: KvLayout
    split: int

    name = "write_heads"
    template = ("urdir.templates", "write_heads.ptx.j2")

    def __post_init__(self) -> None:
        of = self.layout
        if of.dtype != "f16" or of.sequences > 1 or of.is_paged or of.capacity or of.values_in_keys:
            raise PtxgenError(f"heads are written to a plain f16 cache of one sequence: not {of}")
        if not 0 < self.split < of.head_dim or self.split % 8:
            raise PtxgenError(
                f"keys of {of.head_dim} values in two parts, the first of {self.split}: multiples "
                "of 8"
            )
        if of.slots * self.eights >= 2**31:
            raise PtxgenError(f"{of.slots:,} slots of a cache are too many to write at once")

    @property
    def tokens(self) -> int:
        """Tokens that are written."""
        return self.layout.max_len

    @property
    def kv_heads(self) -> int:
        """Heads of a token."""
        return self.layout.kv_heads

    @property
    def rest(self) -> int:
        """Values of a key that are of one head."""
        return self.layout.head_dim - self.split

    @property
    def value_dim(self) -> int:
        """Values of a head of V."""
        return self.layout.values_per_head

    @property
    def eights(self) -> int:
        """Groups of eight values in a key and its value: one a thread."""
        return (self.layout.head_dim + self.value_dim) // 8

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("head", "f32", ("tokens", "split"), Access.IN),
            Param("still", "f32", ("tokens", "kv_heads", "rest"), Access.IN),
            Param("v", "f32", ("tokens", "kv_heads", "value_dim"), Access.IN),
            *self.layout.params(Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.layout.slots * self.eights, THREADS)
        return LaunchShape(grid=(ctas, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        shared = np.repeat(inputs["head"][:, None], self.kv_heads, axis=1)
        keys = np.concatenate([shared, inputs["still"]], axis=2)
        caches = {"k_cache": keys, "v_cache": inputs["v"]}
        with np.errstate(over="ignore"):
            return {n: x.transpose(1, 0, 2)[None].astype(np.float16) for n, x in caches.items()}

    @classmethod
    def examples(cls) -> Mapping[str, WriteHeads]:
        return {
            "one": cls(KvLayout(1, 1, 1, 16, "f16"), 8),
            "heads": cls(KvLayout(1, 3, 21, 96, "f16", value_dim=64), 32),
            "wide": cls(KvLayout(1, 2, 9, 192, "f16", value_dim=128), 64),
        }

    def flops(self) -> int:
        return 0
