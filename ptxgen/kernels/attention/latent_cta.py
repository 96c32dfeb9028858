"""Division of work and shared memory in a CTA of latent decoding, for its templates."""

from __future__ import annotations

from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.target import Target

#: Threads per CTA, a warpgroup.
WARPGROUP = 128
#: Keys of a tile: the height of a wgmma. Dims of a block: a 128-byte line of shared memory.
TILE_KEYS, BLOCK_DIMS, LINE_NBYTES = 64, 64, 128
#: Period of wgmma's swizzling.
ALIGNMENT = 1024


class LatentCta:
    """Offsets in bytes from the first multiple of `ALIGNMENT` in dynamic shared memory.

    A tile of keys, whose first block is replaced by the weights once scores exist, and the rest by
    the outputs in order; queries, replaced by the sums that the CTAs of a cluster exchange; then
    smaller items.
    """

    #: Weights are at most 2 to this power: small ones keep their low parts in f16.
    lift = 14

    def __init__(self, spec: FlashDecode, target: Target) -> None:
        layout = spec.layout
        self.spec, self.target, self.layout, self.tile = spec, target, layout, spec.most_heads
        self.tiles = spec.head_tiles.each
        # a CTA takes one row
        self.rows, self.has_holes = 1, False
        self.half = layout.dtype
        # the bits of an f32 that one of its two parts holds exactly
        self.high_bits = "0xFFFF0000" if self.half == "bf16" else "0xFFFFE000"
        self.threads, self.warps = WARPGROUP, WARPGROUP // 32
        self.head_dim, self.value_dim = spec.head_dim, spec.value_dim
        self.blocks, self.value_blocks = self.head_dim // BLOCK_DIMS, self.value_dim // BLOCK_DIMS
        # whether a rotated pair is two halves of the rotated dims, not neighbours
        self.halves = spec.rope is not None and spec.rope.style == "half"
        # a high and a low part of each head; heads of a lane's scores, and of a warp's queries
        self.columns = 2 * self.tile
        self.own_heads, self.warp_heads = self.tile // 4, self.tile // self.warps

        self.block_nbytes = TILE_KEYS * LINE_NBYTES
        # a block of queries, or weights; a block's sums of all heads, and those that a CTA merges
        self.line_block = self.columns * LINE_NBYTES
        self.part_nbytes = 4 * BLOCK_DIMS * self.tile
        self.rank_blocks = self.value_blocks // spec.cluster
        self.rank_nbytes = self.rank_blocks * self.part_nbytes
        self.outputs_at = self.block_nbytes
        self.queries_at = self.inbox_at = self.blocks * self.block_nbytes
        # maxima and sums of weights of the cluster's CTAs, and the factors and sums computed from
        # these
        self.tops_at = self.queries_at + self.blocks * self.line_block
        self.factors_at = self.tops_at + 8 * spec.cluster * self.tile
        self.totals_at = self.factors_at + 4 * spec.cluster * self.tile
        # results that warps combine; the row's new key; its warps' sums of squares; the mbarrier
        self.warps_at = self.totals_at + 8 * self.tile
        self.token_at = self.warps_at + 16 * self.tile
        self.squares_at = self.token_at + 2 * self.head_dim
        self.barrier_at = self.squares_at + 16
        self.nbytes = self.barrier_at + 16 + ALIGNMENT
