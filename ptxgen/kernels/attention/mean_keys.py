"""Index keys of pools of tokens: means of those of their tokens, normed and rotated (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.pool_keys import MOST_POOL
from urdir.ptxgen.kernels.attention.pooled_keys import PooledKeys, inputs_of_pools, params_of_pools
from urdir.ptxgen.kernels.rotation import Rotation, frequencies, turns_table
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True)
class MeanKeys(PooledKeys):
    """The key of a row's pool of ``pool`` tokens, if the row is the pool's last token: the mean of
    their keys, normed (RMS, ``weight`` (dim,)), its first values rotated by the position of the
    pool's first token.

    Keys of all tokens are in the cache ``raw``; the pool's key goes to the slot of its last token
    in ``k_cache``, which has the same layout.
    """

    layout: KvLayout
    pool: int
    rotation: Rotation
    eps: float
    rows: int = 1

    name = "mean_keys"
    limits = limited(rows=GRID_ROWS, pool=range(2, MOST_POOL + 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        layout = self.layout
        if layout.kv_heads != 1 or not layout.values_in_keys or layout.capacity:
            raise PtxgenError("mean_keys: keys of one head, of all tokens, without values")
        turns = self.rotation.rotary_dim
        if layout.head_dim % 8 or turns % 16 or turns > layout.head_dim:
            raise PtxgenError(
                f"mean_keys: {turns} of {layout.head_dim} values rotate: multiples of 16 and 8"
            )
        if self.rotation.style != "half":
            raise PtxgenError("mean_keys: halves rotate")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("weight", "f32", ("dim",), Access.IN),
            self.rotation.param,
            *params_of_pools(self.layout, self.layout),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        cache, table = inputs["k_cache"].copy(), inputs.get("block_table")
        for row, position in enumerate(inputs["position"].tolist()):
            if position >= self.layout.max_len or (position + 1) % self.pool:
                continue
            sequence, first = int(inputs["sequence"][row]), position + 1 - self.pool
            tokens = np.arange(first, position + 1)
            keys = self.layout.read(inputs["raw"], sequence, tokens, table)[0].astype(np.float64)
            made = keys.mean(axis=0)
            made = made / np.sqrt((made * made).mean() + self.eps) * inputs["weight"]
            made = self.rotation.turn(made[None, None], [first], inputs["frequencies"])
            self.layout.write(cache, sequence, [position], made, table)
        return {"k_cache": cache}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last tokens of different pools, one of them not the last, and a padding row."""
        inputs, layout = super().make_inputs(rng), self.layout
        pools = np.resize(rng.permutation(layout.max_len // self.pool)[: self.rows], self.rows)
        inputs |= inputs_of_pools(rng, layout, layout, pools, self.pool)
        inputs["frequencies"] = turns_table(frequencies(self.rotation.rotary_dim, 10000.0)[0])
        return inputs

    @classmethod
    def examples(cls) -> dict[str, MeanKeys]:
        keys = partial(KvLayout, values_in_keys=True)

        def of(
            layout: KvLayout, pool: int, turns: int, rows: int, magnitude: float = 1.0
        ) -> MeanKeys:
            return cls(layout, pool, Rotation(turns, "half", magnitude), 1e-5, rows)

        return {
            "f16": of(keys(1, 1, 40, 64, "f16"), 4, 32, 4),
            "f32": of(keys(1, 1, 50, 72, "f32"), 5, 48, 3, 1.2),
            "pages": of(keys(1, 1, 64, 128, "f16", 16, 9), 4, 128, 3),
            "two warps": of(keys(1, 1, 64, 320, "f32", 16, 9), 2, 272, 3),
        }

    def flops(self) -> int:
        return (self.pool + 8) * self.rows * self.dim

    def bytes_moved(self) -> int:
        """Keys of a row's pool, each read once a token of it."""
        return self.rows * (self.layout.token_nbytes + self.layout.token_nbytes // self.pool)
