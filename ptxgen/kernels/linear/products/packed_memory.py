"""Shared memory of a CTA that multiplies packed activation vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from urdir.ptxgen.kernels.linear.packed_parts import BANDS, GROUP_ROWS, PackedCut, PackedPart
from urdir.ptxgen.spec import ceil_div


@dataclass(frozen=True, slots=True)
class PackedMemory:
    """Two rings, of weights and of activations; sums in their place; then barriers and tables.

    Each stage has as many ``barriers``: the full ones of all stages, then the empty ones; split k
    has every ``splits``-th stage of a ring, from k on. Without barriers, its stages follow each
    other. If CTAs take turns, sums stay in registers, a stage of weights is of one row group,
    which has every ``row_groups``-th, and full barriers of weights for the second row group follow.
    Then come ``pairs_nbytes`` or ``factors_nbytes``, and ``adapted_nbytes`` of a `SharedAdapted`.
    """

    cut: PackedCut
    parts: Sequence[PackedPart]
    barriers: int = 2
    pairs_nbytes: int = 0
    factors_nbytes: int = 0
    adapted_nbytes: int = 0

    @property
    def stage_bands(self) -> int:
        """Bands of a stage of weights."""
        return BANDS if self.cut.takes_turns else BANDS * self.cut.row_groups

    @property
    def weight_nbytes(self) -> int:
        """Bytes of a stage of weights."""
        return max(ceil_div(self.stage_bands * part.stride, 128) * 128 for part in self.parts)

    @property
    def weight_slots(self) -> int:
        """Stages of weights of all splits."""
        return self.cut.splits * self.cut.weight_stages

    @property
    def x_slots(self) -> int:
        """Stages of activations of all splits."""
        return self.cut.splits * self.cut.x_stages

    @property
    def slots(self) -> int:
        """Stages of both rings."""
        return self.weight_slots + self.x_slots

    @property
    def x_at(self) -> int:
        """Where stages of activations begin."""
        return self.weight_slots * self.weight_nbytes

    @property
    def sum_stride(self) -> int:
        """f32 sums from a vector to the next: two vectors begin four banks apart."""
        return GROUP_ROWS * self.cut.row_groups + 2

    @property
    def split_nbytes(self) -> int:
        """Bytes of the sums of a split."""
        return 4 * self.cut.vectors * self.sum_stride

    @property
    def barriers_at(self) -> int:
        """Where barriers begin, 8 bytes each."""
        rings = self.x_at + self.x_slots * self.cut.x_nbytes
        return rings if self.cut.takes_turns else max(rings, self.cut.splits * self.split_nbytes)

    @property
    def second_full(self) -> int:
        """Where, after `barriers_at`, the full barriers of the second row group begin. With an odd
        number of stages a row group has each of them every other time: on shared barriers it would
        skip phases of the other one, and could take the parity of such a phase for that of its
        next."""
        return 8 * self.barriers * self.slots

    @property
    def pairs_at(self) -> int:
        """Where pair and weight of each vector lie, 8 bytes, for the last products of a mixture; or
        the barrier of the warps that make factors."""
        return self.barriers_at + self.second_full + 8 * self.weight_slots * self.cut.takes_turns

    @property
    def factors_at(self) -> int:
        """Where the factors of a norm that has begun lie, f32 for each vector."""
        return self.pairs_at + 8

    @property
    def adapted_at(self) -> int:
        """Where a `SharedAdapted` has its barrier and tables."""
        return self.pairs_at + self.factors_nbytes + 15 & -16

    @property
    def nbytes(self) -> int:
        """All, except entries of codebooks."""
        if self.adapted_nbytes:
            return self.adapted_at + self.adapted_nbytes
        return self.pairs_at + self.pairs_nbytes + self.factors_nbytes
