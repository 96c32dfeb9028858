"""Shared memory of CTAs that stay for several products of packed activation vectors."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory

#: Bytes for each vector of the sums that a warpgroup gets from the cluster's other CTA: of half of
#: the vectors, of 64 rows.
OTHERS_NBYTES = 128


@dataclass(frozen=True, slots=True)
class ChainRings:
    """What the products have in common: sums of another CTA's warpgroup, ``slots`` of weights of
    all warpgroups, ``x_nbytes`` for a product's activations and then its sums, barriers, factors of
    norms. Barriers of activations are each product's own, ``x_slots`` of it.
    """

    vectors: int
    slots: int
    slot_nbytes: int
    x_nbytes: int
    x_slots: tuple[int, ...]

    @property
    def weights_at(self) -> int:
        """Where slots of weights begin."""
        return OTHERS_NBYTES * self.vectors

    @property
    def x_at(self) -> int:
        """Where activations begin."""
        return self.weights_at + self.slots * self.slot_nbytes

    @property
    def barriers_at(self) -> int:
        """Where full barriers begin."""
        return self.x_at + self.x_nbytes

    @property
    def barriers(self) -> int:
        """How many there are; as many empty ones follow."""
        return self.slots + sum(self.x_slots)

    @property
    def own_at(self) -> int:
        """Where two barriers of each product begin: of its factors, and of the cluster's sums."""
        return self.barriers_at + 16 * self.barriers

    @property
    def factors_at(self) -> int:
        """Where factors lie."""
        return self.own_at + 16 * len(self.x_slots)

    @property
    def unused_at(self) -> int:
        """Where a word lies that nothing reads."""
        return self.factors_at + 4 * self.vectors

    @property
    def nbytes(self) -> int:
        """All, except entries of codebooks."""
        return self.unused_at + 16


NO_RINGS = ChainRings(0, 0, 0, 0, ())


@dataclass(frozen=True, slots=True)
class ChainMemory(PackedMemory):
    """The memory of product number ``place``, as its templates see it."""

    rings: ChainRings = NO_RINGS
    place: int = 0

    @property
    def weight_nbytes(self) -> int:
        return self.rings.slot_nbytes

    @property
    def weight_slots(self) -> int:
        return self.rings.slots

    @property
    def weights_at(self) -> int:
        """Where slots of weights begin."""
        return self.rings.weights_at

    @property
    def sums_at(self) -> int:
        return self.rings.x_at

    @property
    def first_x(self) -> int:
        return self.rings.slots + sum(self.rings.x_slots[: self.place])

    @property
    def slots(self) -> int:
        return self.rings.barriers

    @property
    def x_at(self) -> int:
        return self.rings.x_at

    @property
    def barriers_at(self) -> int:
        return self.rings.barriers_at

    @property
    def pairs_at(self) -> int:
        return self.rings.own_at + 16 * self.place

    @property
    def summed_at(self) -> int:
        """Where the barrier of the cluster's sums lies."""
        return self.pairs_at + 8

    @property
    def factors_at(self) -> int:
        return self.rings.factors_at

    @property
    def nbytes(self) -> int:
        return self.rings.nbytes
