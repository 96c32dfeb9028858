"""Cuts of rows' keys into chunks, by the number of keys, and chunks for CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.spec import Access, Param, ceil_div

#: Chunk sizes are multiples of this.
CHUNK_UNIT = 16


@dataclass(frozen=True)
class ChunkCut:
    """``share`` equal chunks of at least ``fewest`` keys. If these exceed twice ``about`` (0:
    unlimited), each is cut into equal ones of at most about ``about`` keys."""

    share: int
    fewest: int
    about: int

    def size(self, keys: int) -> int:
        """Keys per chunk (fewer in the last) of a row of ``keys`` keys."""
        each = ceil_div(ceil_div(keys, self.share), self._rounds(keys))
        return max(self.fewest, CHUNK_UNIT * ceil_div(each, CHUNK_UNIT))

    def count(self, keys: int) -> int:
        """Number of chunks of a row of ``keys`` keys."""
        return ceil_div(keys, self.size(keys))

    def most(self, keys: int) -> int:
        """Upper bound on the chunks of any row of up to ``keys`` keys."""
        return min(self.share, ceil_div(keys, self.fewest)) * self._rounds(keys)

    def _rounds(self, keys: int) -> int:
        """Number of chunks that each share of the row becomes."""
        each = ceil_div(keys, self.share)
        return ceil_div(each, self.about) if self.about and each > 2 * self.about else 1

    def ranges(self, first: int, end: int) -> list[range]:
        """The chunks of keys first ... end - 1; none if they are one."""
        chunk = self.size(end - first)
        if chunk >= end - first:
            return []
        return [range(start, min(end, start + chunk)) for start in range(first, end, chunk)]


@dataclass(frozen=True)
class KeySplit:
    """The chunks of ``rows`` of up to ``longest`` keys, for the ``ctas`` (or clusters) of a KV
    head, each row divided by ``cut``."""

    cut: ChunkCut
    rows: int
    longest: int
    ctas: int

    @property
    def chunks(self) -> int:
        """Maximum number of chunks of a row."""
        return self.cut.most(self.longest)

    @property
    def params(self) -> tuple[Param, ...]:
        """What CTAs leave for each other, unless each row is one chunk."""
        if self.chunks == 1:
            return ()
        # Chunks that rows lack leave it unchanged: INOUT, not OUT.
        return (
            Param("partial", "f32", ("rows", "heads", self.chunks, "value_dim"), Access.INOUT),
            Param("softmax", "f32", ("rows", "heads", self.chunks, 2), Access.INOUT),
            Param("arrived", "u32", ("rows", "heads"), Access.INOUT),
        )

    @property
    def takers(self) -> int:
        """CTAs (clusters) of a KV head (tile of query heads) in the grid."""
        return min(self.ctas, self.rows * self.chunks)

    @property
    def deals(self) -> bool:
        """Whether a CTA may get several chunks."""
        return self.rows * self.chunks > self.takers
