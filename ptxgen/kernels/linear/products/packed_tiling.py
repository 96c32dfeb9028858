"""How the product with many packed activation vectors is divided among CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.kernels.linear.packed_parts import (
    BANDS,
    GROUP_ROWS,
    Mixture,
    PackedCut,
    PackedPart,
)
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import GROUP, packed_shape


@dataclass(frozen=True)
class PackedTiling:
    """CTAs of a launch: along the rows of its ``matrices`` (type, rows), side by side, and along
    its vectors, a tile of y each, as the ``cut`` says.

    There are ``batch`` vectors, or rows of a ``mixture``; x has room for ``room`` vectors, or with
    0 for these alone. ``pair``: matrices that are multiplied together. ``packs``: y is packed.
    """

    cut: PackedCut
    matrices: tuple[tuple[Format, int], ...]
    cols: int
    batch: int
    pair: int = 1
    packs: bool = False
    room: int = 0
    mixture: Mixture | None = None

    @property
    def vectors(self) -> int:
        """Vectors of x: places of the list of a mixture."""
        if self.mixture is not None:
            return self.mixture.places(self.batch)
        return self.room or self.batch

    @property
    def products(self) -> int:
        """Vectors that are multiplied with a matrix each: a mixture's pairs."""
        return self.batch * (1 if self.mixture is None else self.mixture.used)

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return ceil_div(self.vectors, GROUP)

    @property
    def tiles(self) -> int:
        """Tiles of vectors."""
        if self.mixture is not None:
            return self.mixture.tiles(self.batch)
        return ceil_div(self.batch if self.room else self.groups * GROUP, self.cut.vectors)

    @property
    def x_in_one(self) -> bool:
        """Whether slices of x that follow each other are one run for a CTA: it has all vectors."""
        return self.mixture is None and self.groups * GROUP == self.cut.vectors

    @property
    def cta_rows(self) -> int:
        """Rows of y of a CTA."""
        return GROUP_ROWS * self.cut.row_groups // self.pair

    @property
    def row_ctas(self) -> int:
        """CTAs along the rows of all matrices."""
        return self.parts[-1].first_cta + self.parts[-1].ctas

    @cached_property
    def parts(self) -> tuple[PackedPart, ...]:
        """The matrices, with the CTAs of each."""
        # Warps that store y themselves in the order of rows have neighbouring ones, 32 bytes of
        # each vector at least. On an H200 three matrices of 1,024 x 1,024, 8,192 vectors, take
        # 155 us with 16 bytes.
        neighbours = self.cut.takes_turns and not self.packs
        experts = 1 if self.mixture is None else self.mixture.experts
        parts: list[PackedPart] = []
        for number, (fmt, rows) in enumerate(self.matrices):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            layout = Layout(fmt, experts * rows, self.cols)
            ctas = ceil_div(self._padded(rows), self.cta_rows)
            parts.append(PackedPart(number, layout, first, ctas, experts, neighbours))
        return tuple(parts)

    def _padded(self, rows: int) -> int:
        """Rows of a matrix for the CTAs: a packed y has whole tiles of 256 columns. Of 128 rows, 64
        are every other band of 16, the first ones or the others."""
        if self.packs:
            return GROUP_ROWS * packed_shape(1, rows)[0]
        blocks, bands = divmod(ceil_div(rows, TILE_ROWS), 2 * BANDS)
        return GROUP_ROWS * (2 * blocks + min(bands, 2))
