"""Incremental attention: each row's queries over all its keys in one CTA, for short contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.kernels.attention.decode_cta import DecodeCta
from urdir.ptxgen.kernels.attention.decode_memory import DecodeMemory, token_and_queries
from urdir.ptxgen.kernels.attention.head_tiles import WARPS, HeadTiles, decode_tiles
from urdir.ptxgen.kernels.attention.incremental_attention_examples import examples_of_rows
from urdir.ptxgen.kernels.attention.random_inputs import rows_of_decode
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.token_reference import appended
from urdir.ptxgen.spec import Array, LaunchShape
from urdir.ptxgen.target import Target


@dataclass(frozen=True)
class IncrementalAttention(DecodeAttention):
    """Attention of each row over its keys, by one CTA for each (KV head, tile of heads, row).

    See DecodeAttention for the computation. Grouped-query attention (Ainslie et al. 2023, arXiv
    2305.13245), online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867). A position from
    ``max_len`` on marks a padding row: zeros. ``starts_next``: the next launch may start before
    this one waits, as it may where there are five to eight rows.
    """

    warps: int = WARPS
    starts_next: bool = False

    name = "incremental_attention"

    @cached_property
    def head_tiles(self) -> HeadTiles:
        shape = (self.layout, self.scores, self.heads, self.rows, self.most_heads)
        return decode_tiles(*shape, warps=self.warps)

    @property
    def memory(self) -> DecodeMemory:
        """The dynamic shared memory of a CTA."""
        return DecodeMemory(*token_and_queries(self))

    def cta(self, target: Target) -> DecodeCta:
        """The template's description of a CTA on ``target``."""
        # reads_once: with it, a step of 8 rows of an 8B Q4_K_M model at 300 keys on an H200 takes
        # 1.635 ms, else 1.647; of one row at 128 keys 1.345 and 1.346: they may be in the cache
        return DecodeCta(self, target, reads_once=self.rows > 1)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.head_tiles.count, self.rows, 1),
            block=(32 * self.warps, 1, 1),
            shared_bytes=self.memory.nbytes,
            prefers_shared=True,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = appended(self, inputs)
        return {"out": self.out.of(attend(self, inputs), inputs)} | caches

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return rows_of_decode(self, rng)

    @classmethod
    def examples(cls) -> Mapping[str, IncrementalAttention]:
        return examples_of_rows(cls)

    def bytes_moved(self) -> int:
        """K and V of every row at full length, the queries and the output."""
        keys = self.longest * self.layout.pair_nbytes
        return self.rows * (keys + 4 * (self.heads * sum(self.layout.widths) + 2))
