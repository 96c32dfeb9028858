"""Flash decoding: attention split over chunks of the keys (split KV), for long contexts.

FlashDecodeChunk leaves each chunk's sums, FlashDecodeReduce merges them (Dao et al. 2023, "Flash-
Decoding for long-context inference"). The grid is fixed by ``max_keys``, a length bucket; chunks
beyond a row's position leave at once. A row's result depends on its own keys and ``chunk`` alone:
not on ``max_keys``, not on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels._decode_attention import WARPS, DecodeAttention
from urdir.ptxgen.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

MAX_CHUNKS = 65535


@dataclass(frozen=True)
class FlashDecodeChunk(DecodeAttention):
    """Attention of each row over each ``chunk`` of keys, by one CTA for each (KV head, tile of
    heads, row, chunk).

    See DecodeAttention for what it computes. ``partial`` gets sums of weights times V, ``softmax``
    the maximum (of 2's exponent) they are relative to and the sum of weights. With a window,
    chunks are counted from the one that holds the row's first key. ``max_keys`` 0 means
    ``max_len``. Rows must have a position below ``max_keys`` or be idle (from ``max_len`` on): one
    between the two gives NaN.
    """

    max_keys: int = 0
    chunk: int = 256

    name = "flash_decode_chunk"
    template = ("urdir.templates", "flash_decode_chunk.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_keys <= self.layout.max_len:
            raise PtxgenError(
                f"max_keys {self.max_keys} is not in 0..max_len ({self.layout.max_len})"
            )
        if self.chunk < 16 or self.chunk & (self.chunk - 1):
            raise PtxgenError(f"chunk {self.chunk} is no power of two from 16 on")
        if self.chunks > MAX_CHUNKS:
            raise PtxgenError(f"{self.chunks} chunks of {self.chunk} keys: at most {MAX_CHUNKS}")

    @property
    def keys(self) -> int:
        """The length bucket: positions of rows are below."""
        return self.max_keys or self.layout.max_len

    @property
    def chunks(self) -> int:
        """Chunks of a row: of all its keys, or those that a window can touch."""
        chunks = ceil_div(self.keys, self.chunk)
        return min(chunks, ceil_div(self.window - 1, self.chunk) + 1) if self.window else chunks

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.input_params,
            Param("partial", "f32", ("rows", "heads", "chunks", "head_dim"), Access.OUT),
            Param("softmax", "f32", ("rows", "heads", "chunks", 2), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads * self.tiles, self.rows, self.chunks),
            block=(32 * WARPS, 1, 1),
        )

    @property
    def reduce(self) -> FlashDecodeReduce:
        """The kernel that merges this one's chunks."""
        return FlashDecodeReduce(self.heads, self.head_dim, self.chunks, self.rows)
