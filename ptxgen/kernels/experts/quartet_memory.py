"""Shared memory of a CTA that multiplies quartets of pairs with their experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.kernels.linear.cut import MIN_SLOTS, PACE_NBYTES
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import SharedGrids

#: Warps of a CTA, at most and at least.
MAX_WARPS, LEAST_WARPS = 16, 8
#: Bytes before the list of quartets: how many those of each 32 experts are.
COUNTS_NBYTES = 64


@dataclass(frozen=True)
class QuartetMemory:
    """A ring of ``slot_nbytes`` slots for each warp; the activations of two quartets; their sums of
    squares; the list of ``quartets``, eight bytes each, and ``weight_nbytes`` of pairs' weights;
    entries of the codebooks of ``formats``. ``shared`` bytes in all, for up to ``warps`` with up to
    ``stages`` slots, as many for each matrix of a ``pair``. Sizes and offsets (``..._at``) are in
    bytes.
    """

    shared: int
    warps: int
    stages: int
    pair: int
    slot_nbytes: int
    activation_nbytes: int
    square_nbytes: int
    quartets: int
    weight_nbytes: int
    formats: tuple[Format, ...]

    @property
    def list_nbytes(self) -> int:
        """Bytes of the list and of the weights."""
        return COUNTS_NBYTES + 8 * self.quartets + self.weight_nbytes

    @property
    def ring_nbytes(self) -> int:
        """Bytes that are left for rings."""
        others = self.activation_nbytes + self.square_nbytes + self.list_nbytes
        return self.shared - SharedGrids.of(self.formats, others).end

    @cached_property
    def cta_warps(self) -> int:
        """Warps of a CTA: as many as have two slots each."""
        room = self.ring_nbytes // (MIN_SLOTS * self.slot_nbytes)
        return min(self.warps, max(1, room))

    @property
    def fits(self) -> bool:
        """Whether there is room for enough warps."""
        return self.cta_warps >= LEAST_WARPS

    @cached_property
    def ring_slots(self) -> int:
        """Slots of a warp's ring."""
        room = self.ring_nbytes // (self.cta_warps * self.slot_nbytes)
        return min(self.stages, room) // self.pair * self.pair

    @property
    def pace(self) -> int:
        """Tiles of a warp that are loaded before the activations: see `PACE_NBYTES`."""
        paced = PACE_NBYTES // (self.cta_warps * self.slot_nbytes) // self.pair * self.pair
        return min(max(self.pair, paced), self.ring_slots)

    @property
    def activations_at(self) -> int:
        """Where the activations begin."""
        return self.cta_warps * self.ring_slots * self.slot_nbytes

    @property
    def squares_at(self) -> int:
        """Where the sums of squares begin."""
        return self.activations_at + self.activation_nbytes

    @property
    def list_at(self) -> int:
        """Where the list of quartets begins."""
        return self.squares_at + self.square_nbytes

    @property
    def weights_at(self) -> int:
        """Where the pairs' weights begin."""
        return self.list_at + COUNTS_NBYTES + 8 * self.quartets

    @property
    def grids(self) -> SharedGrids:
        """Codebooks whose entries follow."""
        return SharedGrids.of(self.formats, self.list_at + self.list_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.grids.end
