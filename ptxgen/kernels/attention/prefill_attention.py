"""Causal attention over a chunk of a prompt, on tensor cores, without a matrix of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div

#: Queries of a warp: the height of an mma.
WARP_QUERIES = 16
MAX_WARPS = 4
#: Values of a row that a thread stages at once: 16 bytes of f16.
PIECE = 8


@dataclass(frozen=True)
class PrefillAttention(AttentionSpec):
    """Causal attention of a chunk of a prompt; the K and V of its rows are in the cache already.

    See AttentionSpec for what it computes. All rows belong to sequence ``sequence[0]``, usually at
    consecutive positions. Any others work too, but a tile reads all keys between the first and the
    last that some row of it sees.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691). The queries of the heads that share a KV head lie
    in one tile, so that K and V are read once for all of them. q (scaled), the probabilities, K and
    V are rounded to f16, which is exact for K and V of an f16 cache; sums are f32. Scaled queries,
    and keys and values of other caches, become infinite from 65520 on. A NaN or an infinity in V
    also reaches the rows before it whose last key shares its tile, as 0 * infinity.

    A row has the same bits in whatever chunk it stands, whatever (finite) keys and values come
    after it, and in a paged cache as in a contiguous one.
    """

    name = "prefill_attention"
    template = ("urdir.templates", "prefill_attention.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tiles > 65535:
            raise PtxgenError(f"prefill attention of {self.rows} rows: more than 65535 tiles")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.input_params,
            *self.sink_params,
            Param("out", "f32", ("rows", "heads", "value_dim"), Access.OUT),
        )

    @property
    def warps(self) -> int:
        """Warps of a CTA: a power of two, fewer than the most where there are few queries."""
        wanted = ceil_div(self.rows * self.group, WARP_QUERIES)
        return min(2 if self.stages_queries else MAX_WARPS, 1 << (wanted - 1).bit_length())

    @property
    def stages_queries(self) -> bool:
        """Whether queries lie in shared memory: beyond 256 dims, registers do not hold them."""
        return self.head_dim > 256

    @property
    def tiles(self) -> int:
        """CTAs that share one KV head."""
        return ceil_div(self.rows * self.group, self.warps * WARP_QUERIES)

    @property
    def parts(self) -> int:
        """CTAs that share a tile of queries: beyond 128 dims of V (256, where registers hold no
        queries, unless they hold q8_0's scales), sums for all of them are more than the registers
        hold, so that each makes its part of ``out`` (and all of the scores)."""
        is_wide = self.stages_queries and self.layout.dtype != "q8_0"
        return ceil_div(self.value_dim, 256 if is_wide else 128)

    @property
    def out_dims(self) -> int:
        """Dims of ``out``, and so of V, of one CTA, a multiple of eight. Where the parts do not
        divide them, the last two parts have some in common."""
        return PIECE * ceil_div(self.value_dim // PIECE, self.parts)

    @property
    def key_tile(self) -> int:
        """Keys of a step: what registers and shared memory allow."""
        if self.stages_queries:
            return 16
        return 64 if self.head_dim <= 128 else 32

    def stride(self, dims: int) -> int:
        """Bytes of a staged row: 16 more than its f16 values take, so that eight rows' 16 bytes at
        the same dims lie in different banks."""
        return 2 * dims + 16

    @property
    def lanes(self) -> int:
        """Threads that share the staging of a row; enough of them that no thread is left over."""
        even = math.gcd(self.head_dim // PIECE, self.out_dims // PIECE, 8)
        return max(even, 32 * self.warps // self.key_tile)

    def staged(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The pieces that a thread stages of a tile with rows of ``dims``: (key, first dim) of
        each, relative to its first one. Where ``lanes`` do not divide them, some threads have no
        last piece of a row."""
        keys = range(0, self.key_tile, 32 * self.warps // self.lanes)
        steps = range(0, dims, PIECE * self.lanes)
        return tuple((key, dim) for key in keys for dim in steps)

    @property
    def raw_registers(self) -> int:
        """Registers for values between their load and shared memory: those left by the sums."""
        if self.stages_queries:  # of one piece
            return self.layout.raw_words
        return 32 if self.key_tile == 64 else 8

    @property
    def launch_shape(self) -> LaunchShape:
        queries = WARP_QUERIES * self.warps * self.stride(self.head_dim)
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.parts),
            block=(32 * self.warps, 1, 1),
            shared_bytes=queries if self.stages_queries else 0,
        )

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each rounding to f16: q and probabilities; K and V where the cache's own
        values are no f16 (bf16 has fewer bits). Rounding errors of q and K reach the output as
        errors of scores: larger where scores are spread wider than about 2."""
        roundings = 2 if self.layout.dtype in ("f16", "bf16") else 4
        return Tolerance(rtol=roundings * 2**-11)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"out": self.attend(inputs)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk at a random place of a random sequence, often with an idle tail."""
        max_len = self.layout.max_len
        live = min(int(rng.integers(ceil_div(self.rows, 2), self.rows + 1)), max_len)
        start = int(rng.integers(0, max_len - live + 1))
        positions = [start + r if r < live else max_len + 1000 * r for r in range(self.rows)]
        sequence = int(rng.integers(0, self.layout.sequences))
        return self.inputs_at(rng, positions, [sequence] * self.rows)

    @classmethod
    def examples(cls) -> Mapping[str, PrefillAttention]:
        return {
            "one row": cls(1, KvLayout(1, 1, 1, 16, "f16"), rows=1),
            "head_dim 64": cls(2, KvLayout(2, 1, 100, 64, "f16"), rows=17),
            "bf16 softcap": cls(
                4, KvLayout(2, 2, 80, 80, "bf16"), rows=50, scores=Scores(softcap=5.0)
            ),
            "pages window": cls(
                7, KvLayout(2, 1, 160, 128, "f16", 16, 22), rows=20, scores=Scores(window=70)
            ),
            "pages f32 head_dim 256": cls(3, KvLayout(1, 3, 96, 256, "f32", 32, 3), rows=70),
            "pages q8_0 window": cls(
                4,
                KvLayout(1, 1, 192, 96, "q8_0", 64, 4),
                rows=33,
                scores=Scores(window=5, softcap=30.0),
            ),
            "scale": cls(1, KvLayout(2, 1, 70, 112, "f16"), rows=64, scores=Scores(scale=0.25)),
            "head_dim 8": cls(2, KvLayout(1, 1, 40, 8, "f16"), rows=20),
            "head_dim 72": cls(3, KvLayout(1, 1, 80, 72, "f16"), rows=30),
            "head_dim 24 f32": cls(1, KvLayout(1, 1, 70, 24, "f32"), rows=70),
            "head_dim 200": cls(2, KvLayout(1, 1, 50, 200, "bf16"), rows=20),
            "head_dim 264": cls(1, KvLayout(1, 1, 40, 264, "f16"), rows=20),
            "head_dim 512": cls(2, KvLayout(1, 1, 40, 512, "f16"), rows=33),
            "head_dim 512 q8_0": cls(1, KvLayout(1, 1, 30, 512, "q8_0"), 9, Scores(window=20)),
            "value_dim": cls(4, KvLayout(1, 1, 70, 192, "f16", value_dim=128), rows=20),
            "value_dim 328": cls(2, KvLayout(1, 1, 40, 40, "f16", value_dim=328), rows=20),
            "value_dim 24": cls(2, KvLayout(1, 1, 40, 320, "f32", value_dim=24), rows=20),
            "chunk": cls(2, KvLayout(1, 1, 200, 64, "f16"), 90, Scores(chunk=37)),
            "chunk and window": cls(
                1, KvLayout(1, 1, 200, 64, "f32"), 90, Scores(chunk=64, window=50)
            ),
            "sinks": cls(3, KvLayout(1, 1, 90, 64, "f16"), 40, Scores(sinks=True)),
            "sinks window": cls(
                2, KvLayout(1, 1, 160, 32, "f16"), 60, Scores(sinks=True, window=40, softcap=9.0)
            ),
            "ALiBi": cls(3, KvLayout(1, 1, 150, 64, "f16"), 50, Scores(max_bias=8.0)),
            "ring": cls(2, KvLayout(2, 1, 300, 64, "f16", capacity=128), 60, Scores(window=60)),
            "ring of pages": cls(
                2, KvLayout(2, 1, 320, 64, "bf16", 16, 18, capacity=128), 50, Scores(chunk=70)
            ),
        }

    def flops(self) -> int:
        """Of the last ``rows`` positions of a full cache: two products and about eight operations
        of softmax for every key that a query sees."""
        last = range(max(0, self.layout.max_len - self.rows), self.layout.max_len)
        seen = sum(p + 1 - self.scores.first_key(p) for p in last)
        return self.heads * seen * (2 * self.head_dim + 2 * self.value_dim + 8)

    def bytes_moved(self) -> int:
        """q and out, and once K and V of the keys that the last ``rows`` positions see."""
        span = self.scores.span
        keys = min(self.layout.max_len, span + self.rows - 1 if span else 1 << 32)
        ends = self.nbytes(self.param("q")) + self.nbytes(self.param("out"))
        return ends + keys * self.layout.pair_nbytes
