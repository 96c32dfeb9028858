"""Flash decoding: attention split over chunks of the keys (split KV), for long contexts.

FlashDecodeChunk writes each chunk's sums, FlashDecodeReduce merges them (Dao et al. 2023, "Flash-
Decoding for long-context inference"). The grid is fixed by ``max_keys``, a length bucket; CTAs of
chunks beyond a row's position end at once. A row's result depends on its own keys and ``chunk``
alone: not on ``max_keys``, not on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.decode import STEEP, WARPS, DecodeAttention
from urdir.ptxgen.kernels.attention.flash_decode_reduce import MAX_CHUNKS, FlashDecodeReduce
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div


@dataclass(frozen=True)
class FlashDecodeChunk(DecodeAttention):
    """Attention of each row over each ``chunk`` of keys, by one CTA for each (KV head, tile of
    heads, row, chunk).

    See DecodeAttention for what it computes. ``partial`` gets sums of weights times V, ``softmax``
    the maximum (of 2's exponent) they are relative to and the sum of weights. Where rows look
    back on few keys only, chunks are counted from the one that holds the row's first key.
    ``max_keys`` 0 means ``max_len``. Rows must have a position below ``max_keys`` or be idle (from
    ``max_len`` on): one between the two gives NaN.
    """

    max_keys: int = 0
    chunk: int = 256

    splits_keys = True
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
        whole, scores = ceil_div(self.keys, self.chunk), self.scores
        if not scores.span:
            return whole
        if scores.chunk and scores.span == scores.chunk and scores.chunk % self.chunk == 0:
            return min(whole, scores.chunk // self.chunk)
        return min(whole, ceil_div(scores.span - 1, self.chunk) + 1)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.input_params,
            # Empty chunks leave it as it was: INOUT, not OUT.
            Param("partial", "f32", ("rows", "heads", "chunks", "value_dim"), Access.INOUT),
            Param("softmax", "f32", ("rows", "heads", "chunks", 2), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.layout.kv_heads * self.tiles, self.rows, self.chunks),
            block=(32 * WARPS, 1, 1),
            shared_bytes=self.token_nbytes,
            prefers_shared=True,
        )

    @property
    def sink_params(self) -> tuple[Param, ...]:
        """None: sinks take part where chunks are merged."""
        return ()

    @property
    def reduce(self) -> FlashDecodeReduce:
        """The kernel that merges this one's chunks."""
        sinks = self.scores.sinks
        return FlashDecodeReduce(self.heads, self.value_dim, self.chunks, self.rows, sinks)

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=self.rtol)

    def chunk_keys(self, position: int, index: int) -> range:
        """The keys of chunk ``index`` of a row at ``position``; none where it is idle."""
        if position >= self.keys:
            return range(0)
        first = self.scores.first_key(position)
        start = (first // self.chunk + index) * self.chunk
        return range(max(first, start), min(position + 1, start + self.chunk))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs, caches = self.appended(inputs)
        partial = inputs["partial"].copy()
        softmax = np.zeros((self.rows, self.heads, self.chunks, 2), np.float32)
        softmax[..., 0] = -np.inf
        for row, position in enumerate(inputs["position"].tolist()):
            for index in range(self.chunks):
                if keys := self.chunk_keys(position, index):
                    top, total, values = self.softmax(inputs, row, keys[0], keys[-1])
                    softmax[row, :, index] = np.stack([top, total], axis=1)
                    partial[row, :, index] = values
                elif self.keys <= position < self.layout.max_len:
                    softmax[row, :, index, 1] = np.nan
        return {"partial": partial, "softmax": softmax} | caches

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places below the bucket, of several one idle; one head is steep."""
        positions = [int(p) for p in rng.integers(0, self.keys, self.rows)]
        positions[0] = self.keys - 1 - positions[0] // 4
        if self.rows > 1:
            positions[-1] = self.layout.max_len + int(rng.integers(0, 2)) * 1000
        sequences = [r % self.layout.sequences for r in range(self.rows)]
        inputs = self.inputs_at(rng, positions, sequences)
        inputs["q"][:, -1] *= STEEP
        return inputs

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        inputs = super().inputs_at(rng, positions, sequences, block_table)
        return inputs | {"partial": np.zeros(self.shape_of(self.param("partial")), np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, FlashDecodeChunk]:
        return {
            "one chunk": cls(1, KvLayout(1, 1, 16, 64, "f16"), chunk=16),
            "head_dim 80": cls(4, KvLayout(1, 2, 70, 80, "f16"), chunk=32),
            "fewer keys than the cache": cls(
                4, KvLayout(1, 1, 200, 128, "f16"), max_keys=130, chunk=64
            ),
            "bf16": cls(7, KvLayout(1, 1, 50, 128, "bf16"), chunk=16),
            "f32 rows": cls(12, KvLayout(2, 1, 60, 96, "f32"), rows=3, max_keys=47, chunk=16),
            "window": cls(
                3, KvLayout(2, 1, 70, 112, "f16"), rows=3, scores=Scores(window=20), chunk=16
            ),
            "q8_0 softcap": cls(
                8, KvLayout(1, 1, 64, 256, "q8_0"), scores=Scores(softcap=50.0), chunk=32
            ),
            "pages": cls(4, KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=10), rows=3, chunk=32),
            "pages q8_0": cls(
                2, KvLayout(3, 1, 128, 128, "q8_0", page_len=64, pages=7), rows=4, chunk=16
            ),
            "pages f32 window": cls(
                2,
                KvLayout(1, 1, 64, 256, "f32", page_len=16, pages=5),
                scores=Scores(window=33),
                chunk=32,
            ),
            "head_dim 512": cls(2, KvLayout(1, 1, 40, 512, "f16"), chunk=16),
            "value_dim": cls(3, KvLayout(1, 1, 40, 192, "f16", value_dim=128), chunk=32),
            "chunk sinks": cls(
                2, KvLayout(3, 1, 90, 64, "f16"), 3, Scores(chunk=48, sinks=True), chunk=16
            ),
            "ALiBi": cls(3, KvLayout(2, 1, 70, 64, "f16"), 3, Scores(max_bias=8.0), chunk=32),
            "ring": cls(
                2,
                KvLayout(3, 1, 160, 64, "f16", 16, 13, capacity=64),
                3,
                Scores(window=50),
                chunk=16,
            ),
            **cls._examples_with_a_token(),
        }

    @classmethod
    def _examples_with_a_token(cls) -> Mapping[str, FlashDecodeChunk]:
        """Every type of cache; chunks shorter and longer than a step of keys."""
        whole = OwnToken(Rotation(128, "half"))
        half = OwnToken(Rotation(64, "interleaved", magnitude=1.2))
        return {
            "rope": cls(4, KvLayout(1, 1, 200, 128, "f16"), token=whole, max_keys=130, chunk=64),
            "rope f32 rows": cls(
                12, KvLayout(2, 1, 60, 96, "f32"), rows=3, token=half, max_keys=47, chunk=16
            ),
            "rope bf16 window": cls(
                3,
                KvLayout(2, 1, 70, 112, "bf16"),
                rows=3,
                scores=Scores(window=20),
                token=half,
                chunk=16,
            ),
            "rope q8_0 head_dim 256": cls(
                8, KvLayout(1, 1, 64, 256, "q8_0"), token=OwnToken(Rotation(90, "half")), chunk=32
            ),
            "rope pages": cls(
                4, KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=14), 3, token=half, chunk=32
            ),
            "norms head_dim 512 shared": cls(
                2,
                KvLayout(1, 1, 40, 512, "f16", value_dim=64),
                token=OwnToken(Rotation(128, "half"), QK_NORM, appends=False),
                chunk=16,
            ),
            "norm of rows": cls(
                6,
                KvLayout(2, 2, 60, 96, "bf16"),
                rows=2,
                token=OwnToken(Rotation(96, "half"), QK_NORM, qk_norm_over="row"),
                chunk=16,
            ),
            "norms ring": cls(
                3,
                KvLayout(2, 1, 100, 96, "q8_0", capacity=64),
                rows=2,
                scores=Scores(chunk=64, window=40),
                token=OwnToken(None, QK_NORM, V_NORM, Temperature(0.2, 16)),
                chunk=16,
            ),
            "rope pages q8_0": cls(
                2, KvLayout(3, 1, 128, 128, "q8_0", 64, 7), rows=4, token=whole, chunk=16
            ),
        }

    def flops(self) -> int:
        return self.rows * self.heads * self._longest * (2 * self.head_dim + 2 * self.value_dim + 8)

    def bytes_moved(self) -> int:
        """K and V of every row at full length, queries read, a part of each chunk written."""
        parts = self.chunks * (self.value_dim + 2)
        return self._kv_bytes() + 4 * self.rows * self.heads * (self.head_dim + parts)

    @property
    def _longest(self) -> int:
        return min(self.scores.span or self.keys, self.keys)
