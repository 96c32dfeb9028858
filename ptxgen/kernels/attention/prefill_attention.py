"""Prefill attention: causal attention over a chunk of a prompt, on tensor cores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from urdir.ptxgen.kernels.attention.prefill_examples import prefill_examples
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
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
    def examples(cls) -> dict[str, PrefillAttention]:
        return prefill_examples(cls)
