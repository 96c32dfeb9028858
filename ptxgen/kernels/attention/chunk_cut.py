"""How a row's keys are cut into chunks, as a function of how many there are."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.spec import ceil_div

#: Chunks are multiples of this.
CHUNK_UNIT = 16


@dataclass(frozen=True)
class ChunkCut:
    """``share`` equal chunks, but of at least ``fewest`` keys. Where these were more than twice
    ``about`` (0: any number), each is cut into equal ones of at most about ``about`` keys."""

    share: int
    fewest: int
    about: int

    def size(self, keys: int) -> int:
        """Keys of each chunk (the last may have fewer) of a row of ``keys`` keys."""
        each = ceil_div(ceil_div(keys, self.share), self._rounds(keys))
        return max(self.fewest, CHUNK_UNIT * ceil_div(each, CHUNK_UNIT))

    def count(self, keys: int) -> int:
        """How many chunks a row of ``keys`` keys has."""
        return ceil_div(keys, self.size(keys))

    def most(self, keys: int) -> int:
        """At least as many as any row of up to ``keys`` keys has."""
        return min(self.share, ceil_div(keys, self.fewest)) * self._rounds(keys)

    def _rounds(self, keys: int) -> int:
        """Chunks that each share of the row becomes."""
        each = ceil_div(keys, self.share)
        return ceil_div(each, self.about) if self.about and each > 2 * self.about else 1
