"""Heads among the lanes of a CTA where no tensor cores multiply."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.spec import ceil_div

#: Values of a head per lane: 16 bytes of f16.
LANE_DIMS = 8


@dataclass(frozen=True, slots=True)
class HeadLanes:
    """A group of lanes of the ``warps`` has a key of ``head_dim`` values at a time, and its value
    of ``value_dim``; a lane groups of eight of them."""

    head_dim: int
    value_dim: int
    warps: int

    @property
    def count(self) -> int:
        """Lanes of a group: head_dim / 8 (or value_dim / 8, if larger), rounded up to a power of
        two (the rest is idle); at most a warp."""
        eights = max(self.head_dim, self.value_dim) // LANE_DIMS
        return min(32, 1 << (eights - 1).bit_length())

    @property
    def pieces(self) -> tuple[int, int]:
        """Number of groups of eight dims per lane, of a key and of a value: groups lane, lane + 32,
        ..."""
        first, second = (
            ceil_div(dims // LANE_DIMS, self.count) for dims in (self.head_dim, self.value_dim)
        )
        return first, second

    @property
    def keys_per_pass(self) -> int:
        """Keys that a CTA takes at once, one per group."""
        return self.warps * (32 // self.count)
