"""Appending one token's keys and values to a layer's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import (
    NUMPY_DTYPES,
    Access,
    Array,
    KernelSpec,
    LaunchShape,
    Param,
    ceil_div,
)

#: Element types a KV cache can hold.
KvDtype = Literal["f16", "f32"]
KV_DTYPES: tuple[KvDtype, ...] = ("f16", "f32")


def check_cache(kv_heads: int, head_dim: int, max_len: int, dtype: str) -> None:
    """Raises PtxgenError for a KV cache (kv_heads, max_len, head_dim) that no kernel handles."""
    if dtype not in KV_DTYPES:
        raise PtxgenError(f"KV cache type {dtype!r} is none of {', '.join(KV_DTYPES)}")
    if not 8 <= head_dim <= 1024 or head_dim % 8:
        raise PtxgenError(f"head_dim {head_dim} of a KV cache must be a multiple of 8 in 8..1024")
    if kv_heads < 1 or max_len < 1:
        raise PtxgenError(f"empty KV cache: kv_heads {kv_heads}, max_len {max_len}")
    if max_len * head_dim * NUMPY_DTYPES[dtype].itemsize >= 1 << 32:
        raise PtxgenError(
            f"one head of the KV cache, {max_len} x {head_dim} {dtype}, exceeds 4 GiB"
        )


@dataclass(frozen=True)
class KvAppend(KernelSpec):
    """Writes k and v into row ``position`` of every head of a layer's KV cache.

    f16 rounds to nearest even; what exceeds its range (65504) becomes infinity. A position
    outside the cache writes nothing: the host refuses it before the launch.
    """

    kv_heads: int
    head_dim: int
    max_len: int
    dtype: KvDtype

    name = "kv_append"
    template = ("urdir.templates", "kv_append.ptx.j2")

    def __post_init__(self) -> None:
        check_cache(self.kv_heads, self.head_dim, self.max_len, self.dtype)

    @property
    def params(self) -> tuple[Param, ...]:
        cache = ("kv_heads", "max_len", "head_dim")
        return (
            Param("k", "f32", ("kv_heads", "head_dim"), Access.IN),
            Param("v", "f32", ("kv_heads", "head_dim"), Access.IN),
            # One row of a cache is written, the others must survive: INOUT, not OUT.
            Param("k_cache", self.dtype, cache, Access.INOUT),
            Param("v_cache", self.dtype, cache, Access.INOUT),
            Param("position", "u32", (1,), Access.IN),
        )

    @property
    def vectors(self) -> int:
        """Groups of four values in a row: one a thread."""
        return self.head_dim // 4

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.kv_heads, 1, 1), block=(32 * ceil_div(self.vectors, 32), 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        position = int(inputs["position"][0])
        caches = {}
        for name in ("k", "v"):
            cache = inputs[f"{name}_cache"].copy()
            if position < self.max_len:
                with np.errstate(over="ignore"):
                    cache[:, position] = inputs[name].astype(cache.dtype)
            caches[f"{name}_cache"] = cache
        return caches

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = super().make_inputs(rng)
        inputs["position"] = rng.integers(0, self.max_len, (1,)).astype(np.uint32)
        return inputs

    @classmethod
    def examples(cls) -> Sequence[KvAppend]:
        return (
            cls(kv_heads=1, head_dim=8, max_len=1, dtype="f32"),
            cls(kv_heads=3, head_dim=80, max_len=7, dtype="f16"),
            cls(kv_heads=2, head_dim=64, max_len=33, dtype="f32"),
            cls(kv_heads=8, head_dim=128, max_len=16, dtype="f16"),
            cls(kv_heads=1, head_dim=256, max_len=5, dtype="f16"),
        )

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """k and v read, one row of each cache written."""
        itemsize = NUMPY_DTYPES[self.dtype].itemsize
        return 2 * self.kv_heads * self.head_dim * (4 + itemsize)
