"""Gather cached latent tokens for products that compute per-head keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128


@dataclass(frozen=True)
class CachedTokens(KernelSpec):
    """The cached keys of ``tokens`` tokens of any sequences, split: the first ``split`` values
    become the first values of the keys of all ``heads`` (heads, room, width) f16, whose other
    values are unchanged, and the rest becomes ``tail`` (tokens, rest) f32.

    The number of tokens is not part of the text, but the scalar ``length``. Each ``unit`` of them
    belongs to one sequence: ``units`` (n, 4) u32 have the sequence, the first token in it, and the
    number of tokens; missing tokens become zeros. For caches with a single KV head.
    """

    layout: KvLayout
    tokens: int
    unit: int
    split: int
    heads: int
    width: int
    room: int

    name = "cached_tokens"
    launch_fields = frozenset({"tokens"})

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
        if min(self.tokens, self.unit) < 1 or self.tokens % self.unit or self.tokens > self.room:
            raise PtxgenError(
                f"{self.tokens} tokens of a cache, in units of {self.unit}: room for {self.room}"
            )
        if self.room * self.eights >= 2**31:
            raise PtxgenError(f"{self.room} tokens of a cache: too many for one launch")

    @property
    def own_units(self) -> int:
        """Number of units of the tokens."""
        return self.tokens // self.unit

    @property
    def rest(self) -> int:
        """Width of the second part."""
        return self.layout.head_dim - self.split

    @property
    def eights(self) -> int:
        """Groups of eight values in a key: one per thread."""
        return self.layout.head_dim // 8

    @property
    def params(self) -> tuple[Param, ...]:
        keys = tuple(p for p in self.layout.params(Access.IN) if p.name != "v_cache")
        return (
            Param("length", "u32"),
            *keys,
            Param("units", "u32", ("own_units", 4), Access.IN),
            # other values of the rows are preserved: INOUT, not OUT
            Param("keys", "f16", ("heads", "room", "width"), Access.INOUT),
            Param("tail", "f32", ("tokens", "rest"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.tokens * self.eights, THREADS)
        return LaunchShape(grid=(ctas, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        keys = np.zeros((self.tokens, self.layout.head_dim), np.float32)
        table = inputs.get("block_table")
        for number, (sequence, first, count, _) in enumerate(inputs["units"].tolist()):
            if count:
                found, at = np.arange(first, first + count), number * self.unit
                own = self.layout.read(inputs["k_cache"], sequence, found, table)
                keys[at : at + count] = own[0]
        heads = inputs["keys"].copy()
        with np.errstate(over="ignore"):
            heads[:, : self.tokens, : self.split] = keys[:, : self.split].astype(np.float16)
        return {"keys": heads, "tail": keys[:, self.split :]}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Units of any sequences, some of them partial or empty."""
        layout, inputs = self.layout, dict[str, Any]()
        units = np.zeros((self.tokens // self.unit, 4), np.uint32)
        lengths = rng.integers(1, layout.max_len + 1, layout.sequences)
        for unit in units:
            sequence = int(rng.integers(layout.sequences))
            first = int(rng.integers(lengths[sequence]))
            unit[:3] = sequence, first, rng.integers(min(self.unit, lengths[sequence] - first) + 1)
        table = None
        if layout.is_paged:
            inputs["block_table"] = table = layout.random_table(rng)
        inputs["length"] = np.uint32(self.tokens)
        inputs["k_cache"] = layout.random_cache(rng, lengths.tolist(), table)
        shape = (self.heads, self.room, self.width)
        return inputs | {"units": units, "keys": rng.standard_normal(shape).astype(np.float16)}

    @classmethod
    def examples(cls) -> dict[str, CachedTokens]:
        latent = KvLayout(2, 1, 60, 576, "f16", value_dim=512, values_in_keys=True)
        quants = KvLayout(2, 1, 64, 96, "q8_0", 16, 9, value_dim=64)
        return {
            "latent": cls(latent, 20, 5, 64, 3, 192, 27),
            "pages q8_0": cls(quants, 33, 11, 32, 2, 96, 44),
            "f32": cls(KvLayout(1, 1, 50, 40, "f32", value_dim=32), 50, 50, 8, 1, 40, 50),
            "pages bf16": cls(KvLayout(2, 1, 64, 48, "bf16", 32, 5), 3, 1, 40, 5, 40, 4),
        }

    def bytes_moved(self) -> int:
        """The tokens' keys, read once, and both parts written."""
        parts = 2 * self.heads * self.split + 4 * self.rest
        return self.tokens * (self.layout.token_nbytes + parts)
