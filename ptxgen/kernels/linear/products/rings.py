"""Shared memory of products whose copies go through two rings: weights, then activations."""

from __future__ import annotations

from typing import Protocol

from urdir.ptxgen.kernels.linear.packed_parts import PackedCut
from urdir.ptxgen.kernels.linear.products.packed_tiling import PackedTiling


class RingCut(PackedCut, Protocol):
    """A cut with stages of a tile of weights, and of activations, for each split."""

    @property
    def weight_stages(self) -> int: ...
    @property
    def x_stages(self) -> int: ...
    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""


class Rings(PackedTiling):
    """Rings of weights and activations, then barriers; sums in the rings' place."""

    cut: RingCut

    @property
    def weight_slots(self) -> int:
        """Stages of weights of all splits: split k has every ``splits``-th, from k on."""
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
    def barriers_at(self) -> int:
        """Where barriers begin: full ones of both rings, then empty ones, 8 bytes each."""
        rings = self.x_at + self.x_slots * self.cut.x_nbytes
        sums = 0 if self.takes_turns else self.cut.splits * self.split_nbytes + 7 & -8
        return max(rings, sums)
