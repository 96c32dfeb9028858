"""Index keys of pools of tokens: sums of those of their tokens, weighted by value (GLM 5.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.pooled_keys import PooledKeys, inputs_of_pools, params_of_pools
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, Param, Tolerance

#: Tokens of a pool at most.
MOST_POOL = 64


@dataclass(frozen=True)
class PoolKeys(PooledKeys):
    """The key of a row's pool of ``pool`` tokens, if the row is the pool's last token: the sum of
    keys, weighted value by value by the softmax of gates + ``places`` (pool, dim) over tokens.

    Keys and gates of all tokens, dim values each side by side, are in the cache ``raw``; the pool's
    key goes to the slot of its last token in ``k_cache``, which has the same slots.
    """

    raw: KvLayout
    pool: int
    rows: int = 1

    name = "pool_keys"
    limits = limited(rows=GRID_ROWS, pool=range(2, MOST_POOL + 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        raw = self.raw
        if raw.kv_heads != 1 or not raw.values_in_keys or raw.capacity or raw.head_dim % 16:
            raise PtxgenError("pool_keys: keys and gates of one head, of all tokens")

    @property
    def layout(self) -> KvLayout:  # type: ignore[override]  # a field of others
        """The layout of pools' keys."""
        return replace(self.raw, head_dim=self.raw.head_dim // 2)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("places", "f32", ("pool", "dim"), Access.IN),
            *params_of_pools(self.raw, self.layout),
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-5 if self.raw.dtype == "f32" else 1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        cache, places = inputs["k_cache"].copy(), inputs["places"].astype(np.float64)
        for row, position in enumerate(inputs["position"].tolist()):
            if position >= self.raw.max_len or (position + 1) % self.pool:
                continue
            sequence, table = int(inputs["sequence"][row]), inputs.get("block_table")
            tokens = np.arange(position + 1 - self.pool, position + 1)
            both = self.raw.read(inputs["raw"], sequence, tokens, table)[0].astype(np.float64)
            keys, logits = both[:, : self.dim], both[:, self.dim :] + places
            weights = np.exp(logits - logits.max(axis=0))
            made = (weights * keys).sum(axis=0) / weights.sum(axis=0)
            self.layout.write(cache, sequence, [position], made[None, None], table)
        return {"k_cache": cache}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last tokens of different pools, one of them not the last, and a padding row."""
        inputs, raw = super().make_inputs(rng), self.raw
        pools = rng.permutation(raw.max_len // self.pool)[: self.rows]
        return inputs | inputs_of_pools(
            rng, raw, self.layout, np.resize(pools, self.rows), self.pool
        )

    @classmethod
    def examples(cls) -> dict[str, PoolKeys]:
        raw = partial(KvLayout, values_in_keys=True)
        return {
            "f16": cls(raw(1, 1, 40, 128, "f16"), 4, 4),
            "f32": cls(raw(1, 1, 50, 144, "f32"), 5, 3),
            "pages": cls(raw(1, 1, 64, 256, "f16", 16, 9), 4, 3),
        }

    def flops(self) -> int:
        return 6 * self.rows * self.dim

    def bytes_moved(self) -> int:
        """Keys and gates of a row's pool, each read once a token of it."""
        return self.rows * (self.raw.token_nbytes + self.layout.token_nbytes // self.pool)
