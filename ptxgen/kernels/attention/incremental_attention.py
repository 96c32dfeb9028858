"""Incremental attention: each row's queries over all its keys in one CTA, for short contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from urdir.ptxgen.kernels.attention.decode import WARPS, DecodeAttention
from urdir.ptxgen.kernels.attention.incremental_attention_examples import examples_of_rows
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.token_reference import appended
from urdir.ptxgen.spec import Array, LaunchShape


@dataclass(frozen=True)
class IncrementalAttention(DecodeAttention):
    """Attention of each row over its keys, by one CTA for each (KV head, tile of heads, row).

    See DecodeAttention for the computation. Grouped-query attention (Ainslie et al. 2023, arXiv
    2305.13245), online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867). A position from
    ``max_len`` on marks a padding row: zeros.
    """

    warps: int = WARPS

    name = "incremental_attention"
    template = ("urdir.templates", "attention/incremental_attention.ptx.j2")

    @property
    def reads_once(self) -> bool:
        # With it, a step of 8 rows of an 8B Q4_K_M model at 300 keys on an H200 takes 1.635 ms,
        # else 1.647; of one row at 128 keys 1.345 and 1.346: it may find them in the cache.
        return self.rows > 1

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads * self.tiles, self.rows, 1),
            block=(32 * self.warps, 1, 1),
            shared_bytes=self.memory.nbytes,
            prefers_shared=True,
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = appended(self, inputs)
        return {"out": self.out.of(attend(self, inputs), inputs)} | caches

    @classmethod
    def examples(cls) -> Mapping[str, IncrementalAttention]:
        return examples_of_rows(cls)

    def bytes_moved(self) -> int:
        """K and V of every row at full length, the queries and the output."""
        ends = self.heads * (self.head_dim + self.value_dim)
        return self._kv_bytes() + 4 * self.rows * (ends + 2)
