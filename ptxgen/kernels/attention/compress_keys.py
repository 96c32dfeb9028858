"""Keys of blocks of tokens: sums of those of their tokens, weighted by value, normed and rotated
(DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.pooled_keys import PooledKeys, inputs_of_pools, params_of_pools
from urdir.ptxgen.kernels.attention.turn_tail import check_tail, turned_tail
from urdir.ptxgen.kernels.rotation import Rotation, frequencies, turns_table
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, Param

#: Tokens of a block at most.
MOST_RATIO = 1024


@dataclass(frozen=True)
class CompressKeys(PooledKeys):
    """The key of a row's block of ``ratio`` tokens, if the row is the block's last token.

    It is the sum of keys (width) of the block's tokens, weighted value by value by the softmax over
    tokens of gates (width) + ``places`` (ratio, width), then normed (RMS, ``weight`` (dim,)), and
    its last values are rotated by the position of the block's first token. Keys and gates of tokens
    are the two heads of the cache ``raw``. Where width is twice dim, the first half is that of the
    block after the token's own, which sums over the tokens of two blocks: the first half of those
    before it, if it is not the first block, and the second half of its own.

    The key goes to the slot of the block's last token, in the last head of ``k_cache``.
    """

    raw: KvLayout
    layout: KvLayout
    ratio: int
    rotation: Rotation
    eps: float
    rows: int = 1

    name = "compress_keys"
    limits = limited(rows=GRID_ROWS, ratio=range(2, MOST_RATIO + 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        raw, to = self.raw, self.layout
        alone = raw.values_in_keys and to.values_in_keys and not (raw.capacity or to.capacity)
        plain = not (raw.format.is_scaled or to.format.is_scaled)
        if raw.kv_heads != 2 or not alone or not plain or raw.slots != to.slots * 2 // to.kv_heads:
            raise PtxgenError("compress_keys: keys and gates of all tokens, of the keys' slots")
        if self.width not in (self.dim, 2 * self.dim):
            raise PtxgenError(f"compress_keys: {self.width} values of a token, {self.dim} of a key")
        check_tail(self.name, self.rotation, self.dim, 8)

    @property
    def width(self) -> int:
        """Values of a token's key."""
        return self.raw.head_dim

    @property
    def halves(self) -> int:
        """Blocks whose tokens a key is made of."""
        return self.width // self.dim

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("places", "f32", ("ratio", "width"), Access.IN),
            Param("weight", "f32", ("dim",), Access.IN),
            self.rotation.param,
            *params_of_pools(self.raw, self.layout),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        cache, places = inputs["k_cache"].copy(), inputs["places"].astype(np.float64)
        table, raw, dim = inputs.get("block_table"), self.raw, self.dim
        for row, position in enumerate(inputs["position"].tolist()):
            if position >= raw.max_len or (position + 1) % self.ratio:
                continue
            sequence, first = int(inputs["sequence"][row]), position + 1 - self.ratio
            parts, logits = [], []
            for half in range(self.halves):
                start = first - (self.halves - 1 - half) * self.ratio
                if start >= 0:
                    tokens = np.arange(start, start + self.ratio)
                    both = raw.read(inputs["raw"], sequence, tokens, table).astype(np.float64)
                    columns = slice(half * dim, (half + 1) * dim)
                    parts.append(both[0][:, columns])
                    logits.append(both[1][:, columns] + places[:, columns])
            key, logit = np.concatenate(parts), np.concatenate(logits)
            weights = np.exp(logit - logit.max(axis=0))
            made = (weights * key).sum(axis=0) / weights.sum(axis=0)
            made = made / np.sqrt((made * made).mean() + self.eps) * inputs["weight"]
            at, turns = np.array([first]), inputs["frequencies"]
            made = turned_tail(made[None, None], self.rotation, at, turns)[0, 0]
            slot = self.layout.slots_of(sequence, [position], table)[-1]
            elements, _ = self.layout.format.encode(made[None].astype(np.float32))
            self.layout.elements(cache)[slot] = elements
        return {"k_cache": cache}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """The last tokens of different blocks, the first one among them, one token that ends no
        block, and a padding row."""
        inputs, raw = super().make_inputs(rng), self.raw
        blocks = rng.permutation(raw.max_len // self.ratio)[: self.rows]
        if 0 not in blocks:
            blocks[0] = 0
        blocks = np.resize(blocks, self.rows)
        inputs |= inputs_of_pools(rng, raw, self.layout, blocks, self.ratio)
        radians = frequencies(self.rotation.rotary_dim, 10000.0)[0]
        inputs["frequencies"] = turns_table(radians)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, CompressKeys]:
        layout = partial(KvLayout, values_in_keys=True)

        def of(keys: KvLayout, halves: int, ratio: int, rotary: int, rows: int) -> CompressKeys:
            raw = replace(keys, kv_heads=2, head_dim=halves * keys.head_dim)
            return cls(raw, keys, ratio, Rotation(rotary, "interleaved"), 1e-5, rows)

        return {
            "f16": of(layout(1, 2, 40, 64, "f16"), 2, 4, 32, 5),
            "f32": of(layout(1, 1, 50, 144, "f32"), 1, 5, 16, 3),
            "pages": of(layout(1, 2, 64, 256, "f16", 16, 9), 1, 32, 64, 2),
            "overlapping pages": of(layout(1, 1, 64, 512, "f32", 16, 9), 2, 8, 64, 4),
        }

    def flops(self) -> int:
        return 6 * self.rows * self.width

    def bytes_moved(self) -> int:
        """Keys and gates of a row's block, each read once a token of it."""
        written = self.layout.token_nbytes // self.layout.kv_heads // self.ratio
        return self.rows * (self.raw.token_nbytes + written)
