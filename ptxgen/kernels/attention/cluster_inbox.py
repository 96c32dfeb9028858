"""Shared memory in which the CTAs of a cluster send each other partial sums."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.spec import ceil_div


@dataclass(frozen=True)
class ClusterInbox:
    """Shared memory of each of ``ctas`` CTAs from byte ``at`` on: an mbarrier; the maximum and the
    sum of weights of each of ``heads`` heads from each CTA; each CTA's sums for the part of all
    heads' ``value_dim`` outputs that this CTA merges. Empty for a single CTA.
    """

    ctas: int
    heads: int
    value_dim: int
    at: int

    @property
    def part(self) -> int:
        """Outputs that each CTA merges, in groups of four."""
        return 4 * ceil_div(self.heads * self.value_dim, 4 * self.ctas)

    @property
    def tops_at(self) -> int:
        """Offset of the maxima and sums of weights."""
        return self.at + 16

    @property
    def values_at(self) -> int:
        """Offset of the sums of weighted values."""
        return self.tops_at + 8 * self.ctas * self.heads

    @property
    def end(self) -> int:
        """End offset."""
        return self.values_at + 4 * self.ctas * self.part if self.ctas > 1 else self.at
