"""Where the CTAs of a cluster send each other their sums."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.spec import ceil_div


@dataclass(frozen=True)
class ClusterInbox:
    """Shared memory of each of ``ctas`` CTAs from byte ``at`` on: an mbarrier; of each CTA the
    maximum and the sum of weights of each of ``heads`` heads; of each CTA its sums of the part of
    all heads' ``value_dim`` outputs that this one merges. Nothing where a CTA is alone.
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
        """Where the maxima and sums of weights begin."""
        return self.at + 16

    @property
    def values_at(self) -> int:
        """Where the sums of weighted values begin."""
        return self.tops_at + 8 * self.ctas * self.heads

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.values_at + 4 * self.ctas * self.part if self.ctas > 1 else self.at
