"""What products of packed activation vectors are made of: the cut among CTAs and warps, the
matrices, and the vectors of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.reference import ended, unpacked
from urdir.ptxgen.kernels.linear.steps import Part, Reference
from urdir.ptxgen.kernels.pairs import grouped, most_places, most_tiles, random_choice
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.fields import Plane
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS
from urdir.ptxgen.weights.packed import GROUP, pack, unpack

#: Rows of a row group, and bands that they come from: four warps with 16 rows each.
GROUP_ROWS = 64
BANDS = GROUP_ROWS // TILE_ROWS
#: CTAs of a grid along y.
MAX_GRID = 65535

#: Of the vectors of a tile of a mixture, those that products take.
PARTS = (1, 2, 4)


class PackedCut(Protocol):
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, ``vectors``
    activation vectors, its columns split ``splits`` ways among its warps and among the ``cluster``
    CTAs. A warp has ``operands`` times 16 rows. Each split has ``weight_stages`` stages of a tile
    of weights, and ``x_stages`` of activations. ``resident``: CTAs of an SM."""

    @property
    def row_groups(self) -> int: ...
    @property
    def vectors(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def operands(self) -> int: ...
    @property
    def weight_stages(self) -> int: ...
    @property
    def x_stages(self) -> int: ...
    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""

    @property
    def resident(self) -> int: ...
    @property
    def takes_turns(self) -> bool:
        """Whether a CTA makes several tiles of y."""

    @property
    def multipliers(self) -> int:
        """Threads that multiply."""

    @property
    def registers(self) -> int:
        """Registers of a thread."""

    @property
    def used_registers(self) -> int:
        """Registers that a thread needs."""


@dataclass(frozen=True, slots=True)
class PackedPart(Part):
    """One of the matrices of a launch, with its place in a stage.

    Of the four bands of a row group a warp has four rows each, or with ``neighbours`` eight of each
    of two.
    """

    experts: int = 1
    neighbours: bool = False

    #: Sums are over many tiles, so that weights have all factors.
    exact: ClassVar[bool] = False

    @property
    def format(self) -> Format:
        """The type of its weights."""
        return self.layout.format

    @property
    def halves(self) -> Halves:
        """How its quants become halves."""
        return Halves(self.layout.format)

    @property
    def stride(self) -> int:
        """Bytes from a band's tile to the next in a stage."""
        wanted, at = self.halves.skew, self.layout.tile_nbytes
        return at + (wanted - at) % 128

    def second_row(self, plane: Plane) -> int:
        """Bytes from an item of a plane to that eight rows below in an operand."""
        return 4 * 8 // plane.units * plane.nbytes if self.neighbours else 2 * self.stride

    @property
    def rows(self) -> int:
        """Rows of the matrix, of that of each expert."""
        return self.layout.rows // self.experts

    @property
    def bands(self) -> int:
        """Bands of the same."""
        return self.layout.bands // self.experts

    @property
    def parts(self) -> tuple[PackedPart, ...]:
        """The matrices that its text multiplies with: see `PackedRun`."""
        return (self,)

    @property
    def first_cta_of(self) -> int | str:
        """Operand: the first CTA of the matrix of a CTA."""
        return self.first_cta

    @property
    def last_band(self) -> int | str:
        """Operand: the last band of that matrix."""
        return self.bands - 1

    @property
    def powers(self) -> str:
        """The register, without the `suffix`, after which P of its rows lie."""
        return "weights"

    @property
    def powers_at(self) -> int:
        """How far after."""
        return self.layout.tiles_nbytes


@dataclass(frozen=True, slots=True)
class PackedRun(PackedPart):
    """Matrices of one type, one after the other in the grid, whose products have one text, that of
    the first: they differ in their rows alone, and what a CTA multiplies with is in registers.
    Assembling a text takes more than twice as long as assembling its half."""

    of: tuple[PackedPart, ...] = ()

    suffix = "_of"
    first_cta_of, last_band = "%first_cta_of", "%last_band"
    powers, powers_at = "powers", 0

    @property
    def parts(self) -> tuple[PackedPart, ...]:
        return self.of


def as_run(of: tuple[PackedPart, ...]) -> PackedPart:
    """Matrices of one type as one, or the only one."""
    first, *others = of
    place = (first.number, first.layout, first.first_cta, first.ctas)
    return PackedRun(*place, of=of) if others else first


@dataclass(frozen=True, slots=True)
class Mixture:
    """Vectors are pairs of rows and slots, as `GroupExperts` lists them with tiles of ``height``,
    aligned to groups of vectors; each has the matrix of its expert, one of ``experts``.

    W (experts, rows, cols) and biases (experts, rows) are those of experts, ``batch`` counts rows,
    and a tile of vectors is one of ``tile_of``; x has the vectors in the order of the list. So has
    y if it is packed, and zeros between those of two experts; after the last tile it stays as it
    was. Else y (pairs, rows) is in the order of rows and slots. The list must be complete when the
    launch before this one begins to write: see `Pack`, which waits for it.
    """

    experts: int
    used: int
    height: int

    @property
    def widths(self) -> tuple[int, ...]:
        """How many vectors products of a tile take, widest first: one that has fewer pairs takes
        the narrowest that holds them. Each has a loop of its own."""
        groups = self.height // GROUP
        return tuple(dict.fromkeys(GROUP * ceil_div(groups, part) for part in PARTS))

    def check(self, product: Any) -> None:
        """Raise PtxgenError for a product that is not one of experts."""
        if self.height != product.cut.vectors:
            raise PtxgenError(f"{product.name}: tiles of {self.height} vectors, {product.cut}")
        if product.steps.has(Residual) or product.others or not 1 <= self.used <= self.experts:
            raise PtxgenError(f"{product.name}: {self} without residual and other matrices")
        if product.rows % TILE_ROWS:
            raise PtxgenError(
                f"{product.name}: {product.rows} rows of an expert: a multiple of {TILE_ROWS}"
            )
        if product.tiling.tiles > MAX_GRID:
            raise PtxgenError(
                f"{product.name}: {product.tiling.tiles} tiles are more than {MAX_GRID}"
            )

    def params(self, rows: int, packs: bool) -> list[Param]:
        """The lists of as many rows, as parameters; ``packs``: y is packed, in their order."""
        tile_of = Param("tile_of", "u32", (self.tiles(rows), 4), Access.IN)
        pair = Param("pair", "u32", (self.places(rows),), Access.IN)
        return [tile_of] if packs else [tile_of, pair]

    def lists(self, rows: int, rng: np.random.Generator) -> dict[str, Array]:
        """The lists of as many rows that choose at random."""
        choice = random_choice(rng, rows, self.experts, self.used)
        return grouped(choice, self.experts, self.height, GROUP)

    def places(self, rows: int) -> int:
        """Places of the list of as many rows."""
        return most_places(rows, self.experts, self.used, GROUP)

    def tiles(self, rows: int) -> int:
        """Tiles of the same."""
        return most_tiles(rows, self.experts, self.used, self.height)

    def reference(self, product: Any, inputs: dict[str, Any]) -> Array:
        """The vectors of each tile times their expert's matrix, in the order of the list; if they
        are not packed, in that of rows and slots."""
        x, (part,) = unpack(inputs["x"], product.vectors, product.cols), product.parts
        experts = (self.experts, product.rows, -1)
        matrices = [m.reshape(experts) for m in unpacked(product, part, inputs)]
        y = np.zeros((product.tiling.products, product.rows))
        if product.packs:
            y = unpack(inputs["y"], product.vectors, product.rows)
        for expert, first, count, _ in inputs["tile_of"].tolist():
            vectors = np.arange(first, first + count)
            pairs = vectors if product.packs else inputs["pair"][vectors]
            products = [x[vectors] @ matrix[expert].T for matrix in matrices]
            of = Reference(product, part, inputs, {}, np.full(count, expert), pairs)
            y[pairs] = ended(products, of)
            if product.packs:
                y[first + count : ceil_div(first + count, GROUP) * GROUP] = 0
        return pack(y) if product.packs else y.astype(np.float32)


def takes_packed(formats: tuple[Format, ...]) -> bool:
    """Whether there is such a product for weights of these types."""
    return all(fmt.element != "f32" for fmt in formats)
