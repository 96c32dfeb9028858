"""Incremental attention: one token's queries over the keys and values of a layer's KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.kv_append import KvDtype, check_cache
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

WARPS = 8
#: Query heads that share one read of K and V. Eight would fit into the registers of sm_90, but
#: where the assembler turns a shuffle into a call (nvJitLink 13 before sm_90), only half of the
#: registers survive it.
MAX_TILE = 4
#: Values of a head that one lane owns: 16 bytes of f16.
LANE_DIMS = 8


@dataclass(frozen=True)
class Attention(KernelSpec):
    """out[h] = softmax(scale * q[h] . K[h / group]) V[h / group] over keys 0 ... position.

    Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), online softmax (Milakov &
    Gimelshein 2018, arXiv 1805.02867). ``scale`` None means 1 / sqrt(head_dim). Rows of the
    caches beyond ``position`` are never read; a position past the end means the whole cache.
    """

    heads: int
    kv_heads: int
    head_dim: int
    max_len: int
    dtype: KvDtype
    scale: float | None = None

    name = "attention"
    template = ("urdir.templates", "attention.ptx.j2")

    def __post_init__(self) -> None:
        check_cache(self.kv_heads, self.head_dim, self.max_len, self.dtype)
        if self.heads < 1 or self.heads % self.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )
        if self.head_dim > 32 * LANE_DIMS:
            raise PtxgenError(f"attention takes head_dim up to {32 * LANE_DIMS}: {self.head_dim}")

    @property
    def params(self) -> tuple[Param, ...]:
        cache = ("kv_heads", "max_len", "head_dim")
        return (
            Param("q", "f32", ("heads", "head_dim"), Access.IN),
            Param("k_cache", self.dtype, cache, Access.IN),
            Param("v_cache", self.dtype, cache, Access.IN),
            Param("position", "u32", (1,), Access.IN),
            Param("out", "f32", ("heads", "head_dim"), Access.OUT),
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.group, MAX_TILE)

    @property
    def tile(self) -> int:
        """Query heads of one CTA (the last tile of a KV head may have fewer)."""
        return ceil_div(self.group, self.tiles)

    @property
    def lanes(self) -> int:
        """Lanes that share a key: head_dim / 8, rounded up to a power of two (the rest idle)."""
        return 1 << (self.head_dim // LANE_DIMS - 1).bit_length()

    @property
    def keys_ahead(self) -> int:
        """Keys a lane loads before it uses the first: registers allow more for small tiles."""
        return 4 if self.tile <= 2 else 2

    @property
    def keys_per_pass(self) -> int:
        """Keys a CTA takes at once, one a lane group; it does ``keys_ahead`` passes a step."""
        return WARPS * (32 // self.lanes)

    @property
    def exponent_scale(self) -> float:
        """From q . k to the exponent of 2 in the softmax."""
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return scale * math.log2(math.e)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.kv_heads, self.tiles, 1), block=(32 * WARPS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # The inputs are the cache's own f16 or f32 values: what remains is f32 arithmetic and
        # ex2.approx (2^-22 relative), the same for both.
        return Tolerance(rtol=5e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        length = min(int(inputs["position"][0]) + 1, self.max_len)
        keys = inputs["k_cache"][:, :length].astype(np.float64)
        values = inputs["v_cache"][:, :length].astype(np.float64)
        q = inputs["q"].astype(np.float64).reshape(self.kv_heads, self.group, self.head_dim)
        exponents = np.einsum("hgd,hkd->hgk", q, keys) * self.exponent_scale
        weights = np.exp2(exponents - exponents.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out = np.einsum("hgk,hkd->hgd", weights, values)
        return {"out": out.reshape(self.heads, self.head_dim).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A random position; cache rows beyond it are NaN, which a wrong read lets through."""
        inputs = super().make_inputs(rng)
        position = int(rng.integers(0, self.max_len))
        inputs["position"] = np.array([position], np.uint32)
        for name in ("k_cache", "v_cache"):
            inputs[name][:, position + 1 :] = np.nan
        return inputs

    @classmethod
    def examples(cls) -> Sequence[Attention]:
        shapes = (  # heads, kv_heads, head_dim, max_len, dtype
            (1, 1, 8, 1, "f32"),
            (2, 2, 64, 9, "f16"),
            (4, 2, 80, 70, "f16"),
            (3, 1, 96, 33, "f32"),
            (4, 1, 112, 150, "f16"),
            (7, 1, 128, 131, "f16"),
            (8, 1, 256, 40, "f16"),
            (8, 1, 256, 40, "f32"),
            (24, 2, 64, 300, "f16"),
            (71, 1, 64, 77, "f32"),
        )
        return tuple(cls(h, n, d, length, dtype) for h, n, d, length, dtype in shapes)  # type: ignore[arg-type]

    def flops(self) -> int:
        """At a full cache: two products and about eight operations of softmax a key."""
        return self.heads * self.max_len * (4 * self.head_dim + 8)
