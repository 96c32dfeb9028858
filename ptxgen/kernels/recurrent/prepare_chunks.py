"""State-free part of recurrences for prompts, computed for all chunks at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.chunk_reference import prepared_chunks
from urdir.ptxgen.kernels.recurrent.chunks import RecurrentChunks
from urdir.ptxgen.kernels.recurrent.prepared_layout import BLOCK, CHUNK
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div

#: Warps that prepare a chunk, and for the delta rule, which has more products.
FEW_WARPS, WARPS = 4, 8
#: CTAs of this many warps that fit an SM's registers, and with per-channel gates.
RESIDENT, RESIDENT_OF_CHANNELS = 3, 2
#: CTAs that a GPU holds at once, and the maximum heads per CTA above that.
MANY_CTAS, MOST_HEADS = 256, 16


@dataclass(frozen=True)
class PrepareChunks(RecurrentChunks):
    """The prepared data of `RecurrentChunks`: keys, queries, scores, solutions, decays.

    Factors of products are rounded to f16. With ``channels``, G has a value for each key, and the
    decay between two tokens is multiplied up half by half, not as a quotient of decays from the
    chunk's start: these exceed f32's range. Unused places are not written.
    """

    name = "prepare_chunks"

    @property
    def preparing(self) -> int:
        """Warps per CTA, which prepares a chunk for a head."""
        wide = self.rule.delta and self.rule.key_dim % 32 == 0
        return WARPS if wide else FEW_WARPS

    @property
    def products(self) -> tuple[tuple[bool, int, int], ...]:
        """Products of blocks of tokens with earlier blocks, of keys or of queries: first of keys
        with themselves, which have the most dependent work."""
        pairs = self.prepared.pairs
        of_keys = sorted(pairs, key=lambda pair: pair[0] - pair[1]) if self.rule.delta else []
        return (*((True, i, j) for i, j in of_keys), *((False, i, j) for i, j in pairs))

    @property
    def lanes(self) -> int:
        """Threads per token, each with a part of its keys."""
        return 32 * self.preparing // CHUNK

    @property
    def sharing(self) -> int:
        """Value heads that share tiles."""
        return self.rule.heads // self.tile_heads

    @property
    def heads_each(self) -> int:
        """How many of these a CTA prepares in sequence: few, if there are few CTAs."""
        each = self.slots * self.rule.heads // MANY_CTAS
        return max(1, min(self.sharing, MOST_HEADS, each))

    # ---- shared memory, in bytes: keys and queries, as they are in tiles ----

    @property
    def log_place(self) -> int:
        """After these: two numbers of each token."""
        return 2 * CHUNK * self.prepared.stride

    @property
    def scratch_place(self) -> int:
        """After these: blocks to be inverted."""
        return self.log_place + 8 * CHUNK

    @property
    def totals_place(self) -> int:
        """After these: decays of halves of channels' tokens."""
        nbytes = 4 * BLOCK * BLOCK * self.prepared.blocks
        return self.scratch_place + (nbytes if self.rule.delta else 0)

    @property
    def params(self) -> tuple[Param, ...]:
        rule = self.rule
        read = {rule.qkv.arrays[name] for name in "qk"}
        keys = (p for p in rule.key_params if p.name in read)
        inputs = (*keys, *rule.decay_params, *rule.beta_params)
        segments = Param("segment", "u32", ("segments", 2), Access.IN)
        return (*inputs, segments, *self.prepared_params(Access.INOUT))

    @property
    def launch_shape(self) -> LaunchShape:
        totals = CHUNK * (4 * self.rule.key_dim + 16) if self.rule.channels else 0
        return LaunchShape(
            grid=(self.slots, self.tile_heads, ceil_div(self.sharing, self.heads_each)),
            block=(32 * self.preparing, 1, 1),
            shared_bytes=self.totals_place + totals,
            resident=self._resident,
        )

    @property
    def _resident(self) -> int:
        if self.rule.channels:
            return RESIDENT_OF_CHANNELS
        return RESIDENT if self.preparing == WARPS else 0

    def flops(self) -> int:
        of_tile = CHUNK * self.rule.key_dim * len(self.prepared.squares)
        return 2 * self.rows * self.tile_heads * of_tile

    def bytes_moved(self) -> int:
        """Keys, queries and gates, and the prepared data."""
        rule = self.rule
        row = 2 * rule.key_heads * rule.key_dim + rule.gates + rule.heads * rule.delta
        return 4 * self.rows * row + self.prepared_nbytes

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = self.rule.with_decays(super().make_inputs(rng))
        return {p.name: inputs[p.name] for p in self.params}

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return prepared_chunks(self, inputs)
