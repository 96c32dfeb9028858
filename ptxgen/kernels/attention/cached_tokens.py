"""Tokens of a sequence as its cache holds them, for products that make keys and values of them."""

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
class CachedTokens(KernelSpec):
    """The keys of ``tokens`` tokens from token ``first`` on, of the sequence that a step's prompt
    belongs to: the first ``split`` values of each as those of the keys of all ``heads`` (heads,
    tokens, width) f16, whose others stay as they are, and the rest as ``tail`` (tokens, rest) f32.
    Beyond the step's last token they are zeros.

    The prompt's rows are ``segment`` (first, end) of the step's ``rows``, whose sequences and
    positions are given; they are appended. For caches with a single KV head.
    """

    layout: KvLayout
    tokens: int
    rows: int
    split: int
    heads: int
    width: int

    name = "cached_tokens"
    template = ("urdir.templates", "cached_tokens.ptx.j2")

    def __post_init__(self) -> None:
        if self.layout.kv_heads != 1 or self.layout.capacity:
            raise PtxgenError("cached tokens are those of a single KV head, which are all there")
        if not 0 < self.split < self.layout.head_dim or self.split % 8:
            raise PtxgenError(
                f"keys of {self.layout.head_dim} values in two parts, the first of {self.split}: "
                "multiples of 8"
            )
        if self.width < self.split or self.width % 8 or self.heads < 1:
            raise PtxgenError(f"{self.split} of {self.width} values of {self.heads} heads")
        if min(self.tokens, self.rows) < 1 or self.tokens * self.eights >= 2**31:
            raise PtxgenError(f"{self.tokens} tokens of a cache, for {self.rows} rows")

    @property
    def rest(self) -> int:
        """Values of the second part."""
        return self.layout.head_dim - self.split

    @property
    def eights(self) -> int:
        """Groups of eight values in a key: one a thread."""
        return self.layout.head_dim // 8

    @property
    def params(self) -> tuple[Param, ...]:
        keys = tuple(p for p in self.layout.params(Access.IN) if p.name != "v_cache")
        return (
            Param("first", "u32"),
            *keys,
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("segment", "u32", (1, 2), Access.IN),
            # the other values of its rows must survive: INOUT, not OUT
            Param("keys", "f16", ("heads", "tokens", "width"), Access.INOUT),
            Param("tail", "f32", ("tokens", "rest"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.tokens * self.eights, THREADS)
        return LaunchShape(grid=(ctas, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        row, end = inputs["segment"][0].tolist()
        first, length = int(inputs["first"]), int(inputs["position"][end - 1]) + 1
        found = np.arange(first, min(first + self.tokens, length))
        keys = np.zeros((self.tokens, self.layout.head_dim), np.float32)
        if found.size:
            sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
            keys[: found.size] = self.layout.read(inputs["k_cache"], sequence, found, table)[0]
        heads = inputs["keys"].copy()
        with np.errstate(over="ignore"):
            heads[:, :, : self.split] = keys[:, : self.split].astype(np.float16)
        return {"keys": heads, "tail": keys[:, self.split :]}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last rows of a sequence of any length, some rows idle, from any token of it on."""
        layout, inputs = self.layout, dict[str, Any]()
        live = min(int(rng.integers(1, self.rows + 1)), layout.max_len)
        length = int(rng.integers(live, layout.max_len + 1))
        sequence, table = int(rng.integers(layout.sequences)), None
        if layout.is_paged:
            inputs["block_table"] = table = layout.random_table(rng)
        lengths = [length * (s == sequence) for s in range(layout.sequences)]
        inputs["k_cache"] = layout.random_cache(rng, lengths, table)
        position = np.full(self.rows, layout.max_len, np.uint32)
        position[:live] = np.arange(length - live, length)
        return inputs | {
            "first": np.uint32(rng.integers(0, length)),
            "sequence": np.full(self.rows, sequence, np.uint32),
            "position": position,
            "segment": np.array([[0, live]], np.uint32),
            "keys": rng.standard_normal((self.heads, self.tokens, self.width)).astype(np.float16),
        }

    @classmethod
    def examples(cls) -> Mapping[str, CachedTokens]:
        latent = KvLayout(2, 1, 60, 576, "f16", value_dim=512, values_in_keys=True)
        quants = KvLayout(2, 1, 64, 96, "q8_0", 16, 9, value_dim=64)
        return {
            "latent": cls(latent, 20, 9, 64, 3, 192),
            "pages q8_0": cls(quants, 33, 5, 32, 2, 96),
            "f32": cls(KvLayout(1, 1, 50, 40, "f32", value_dim=32), 50, 7, 8, 1, 40),
            "pages bf16": cls(KvLayout(2, 1, 64, 48, "bf16", 32, 5), 3, 1, 40, 5, 40),
        }

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """The tokens' keys, read once, and both parts."""
        parts = 2 * self.heads * self.split + 4 * self.rest
        return self.tokens * (self.layout.token_nbytes + parts)
