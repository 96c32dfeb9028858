"""Prefill attention: causal attention over a chunk of a prompt, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from urdir.ptxgen.kernels.attention.cache_examples import with_caches
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import LaunchShape, ceil_div

#: Queries per warp: the height of an mma.
WARP_QUERIES = 16
MAX_WARPS = 4
#: Values of a row that a thread stages at once: 16 bytes of f16.
PIECE = 8


@dataclass(frozen=True)
class PrefillAttention(PromptAttention):
    """Causal attention of prompt chunks, for every target, cache and head width.

    See PromptAttention. FlashAttention-2 (Dao 2023, arXiv 2307.08691).
    """

    name = "prefill_attention"
    template = ("urdir.templates", "attention/prefill_attention.ptx.j2")

    @property
    def warps(self) -> int:
        """Warps per CTA: a power of two, fewer if there are few queries."""
        wanted = ceil_div(self.rows * self.group, WARP_QUERIES)
        return min(2 if self.stages_queries else MAX_WARPS, 1 << (wanted - 1).bit_length())

    @property
    def stages_queries(self) -> bool:
        """Whether queries are in shared memory: above 256 dims they do not fit registers."""
        return self.head_dim > 256

    @property
    def queries(self) -> int:
        return self.warps * WARP_QUERIES

    @property
    def parts(self) -> int:
        """CTAs that share a tile of queries: above 128 dims of V (256 if queries are not in
        registers, except with scales), sums for all dims exceed the registers, so each
        computes its part of ``out`` (and all scores)."""
        is_wide = self.stages_queries and not any(of.is_scaled for of in self.layout.formats)
        return ceil_div(self.value_dim, 256 if is_wide else 128)

    @property
    def out_dims(self) -> int:
        """Dims of ``out``, and so of V, per CTA, a multiple of eight. If the parts do not divide
        them, the last two overlap."""
        return PIECE * ceil_div(self.value_dim // PIECE, self.parts)

    @property
    def key_tile(self) -> int:
        """Keys per step, limited by registers and shared memory."""
        if self.stages_queries:
            return 16
        return 64 if self.head_dim <= 128 else 32

    def stride(self, dims: int) -> int:
        """Bytes of a staged row: 16 more than its f16 values, so that eight rows' 16 bytes at the
        same dims lie in different banks."""
        return 2 * dims + 16

    @property
    def lanes(self) -> int:
        """Threads that share the staging of a row, such that no thread is idle; at least the pieces
        of a scale: a thread's pieces are whole scales apart."""
        even = math.gcd(self.head_dim // PIECE, self.out_dims // PIECE, 8)
        least = max(of.unit // PIECE for of in self.layout.formats)
        return max(even, 32 * self.warps // self.key_tile, least)

    def staged(self, dims: int) -> tuple[tuple[int, int], ...]:
        """The pieces of a tile with rows of ``dims`` that a thread stages: (key, first dim) of
        each, relative to the first. If ``lanes`` do not divide them, some threads lack the last
        piece of a row."""
        keys = range(0, self.key_tile, 32 * self.warps // self.lanes)
        steps = range(0, dims, PIECE * self.lanes)
        return tuple((key, dim) for key in keys for dim in steps)

    @property
    def raw_registers(self) -> int:
        """Registers for values between load and shared memory, limited by the sums."""
        if self.stages_queries:  # of one piece
            return max(of.raw_words for of in self.layout.formats)
        return 32 if self.key_tile == 64 else 8

    @property
    def launch_shape(self) -> LaunchShape:
        queries = WARP_QUERIES * self.warps * self.stride(self.head_dim)
        return LaunchShape(
            grid=(self.layout.kv_heads, self.tiles, self.parts),
            block=(32 * self.warps, 1, 1),
            shared_bytes=queries if self.stages_queries else 0,
        )

    @classmethod
    def examples(cls) -> Mapping[str, PrefillAttention]:
        latent = partial(KvLayout, values_in_keys=True)
        examples = {
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
            "latent": cls(3, latent(1, 1, 40, 576, "f16", value_dim=512), rows=18),
            "latent pages q8_0": cls(1, latent(1, 1, 32, 576, "q8_0", 16, 3, 512), rows=9),
            "values in keys": cls(2, latent(2, 2, 70, 72, "bf16", value_dim=48), rows=20),
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
            "relative": cls(2, KvLayout(2, 2, 120, 64, "f16"), 50, Scores(relative=30)),
            "texts": cls(2, KvLayout(1, 2, 200, 64, "f16"), 150, Scores(texts=True)),
            "texts ALiBi": cls(
                3, KvLayout(1, 1, 90, 32, "f32"), 80, Scores(texts=True, max_bias=8.0)
            ),
            "texts relative": cls(
                4, KvLayout(1, 2, 170, 64, "f16"), 130, Scores(texts=True, relative=20)
            ),
            "ring": cls(2, KvLayout(2, 1, 300, 64, "f16", capacity=128), 60, Scores(window=60)),
            "ring of pages": cls(
                2, KvLayout(2, 1, 320, 64, "bf16", 16, 18, capacity=128), 50, Scores(chunk=70)
            ),
        }
        others = {
            "pages window": "fp8",
            "latent": "fp8",
            "head_dim 72": "f32 fp8",
            "ring": "q4_0",
            "value_dim": "f16 q4_0",
            "head_dim 512": "q8_0 q4_0",
        }
        return with_caches(examples, others)
