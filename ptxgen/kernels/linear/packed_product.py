"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.ends import check_ends, end_text
from urdir.ptxgen.kernels.pairs import grouped, most_places, most_tiles, random_choice
from urdir.ptxgen.kernels.rescale import bounded
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import Format, random_blocks
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack

#: Rows of a row group, and bands that they come from: four warps with 16 rows each.
GROUP_ROWS = 64
BANDS = GROUP_ROWS // TILE_ROWS
#: Bytes of shared memory of the largest SM for its CTAs, each of which costs 1 KB more.
SM_NBYTES, CTA_COST = 228 << 10, 1 << 10
#: CTAs of a grid along y.
MAX_GRID = 65535


class PackedCut(Protocol):
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, ``vectors``
    activation vectors, its columns split ``splits`` ways among its warps and among the ``cluster``
    CTAs. A warp has ``operands`` times 16 rows. ``resident``: CTAs of an SM."""

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
    def resident(self) -> int: ...
    @property
    def multipliers(self) -> int:
        """Threads that multiply."""

    @property
    def bands(self) -> int:
        """Bands of a stage of weights."""

    @property
    def registers(self) -> int:
        """Registers of a thread."""

    @property
    def used_registers(self) -> int:
        """Registers that a thread needs."""


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One of the matrices of a launch: names of its registers, its CTAs, its place in a stage."""

    number: int
    layout: Layout
    first_cta: int
    ctas: int
    experts: int = 1

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

    @property
    def rows(self) -> int:
        """Rows of the matrix, of that of each expert."""
        return self.layout.rows // self.experts

    @property
    def bands(self) -> int:
        """Bands of the same."""
        return self.layout.bands // self.experts

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Vectors are pairs of rows and slots, as `GroupExperts` lists them with tiles of ``height``,
    aligned to groups of vectors; each has the matrix of its expert, one of ``experts``.

    ``weighted``: of what is not packed, y is multiplied with the weight of the pair.
    """

    experts: int
    used: int
    height: int
    weighted: bool = False

    def places(self, rows: int) -> int:
        """Places of the list of as many rows."""
        return most_places(rows, self.experts, self.used, GROUP)

    def tiles(self, rows: int) -> int:
        """Tiles of the same."""
        return most_tiles(rows, self.experts, self.used, self.height)


@dataclass(frozen=True)
class PackedProduct(KernelSpec):
    """y[b] = W x[b] (+ bias) for packed f16 activations (`packed`), W (rows, cols) repacked.

    Weights are rounded to f16, P times (`Layout.powers`), in registers; products and sums are f32.
    ``gated``: y = f(W x + bias) (U x + up_bias), U (``up``) like W, f by default silu. Then y is
    multiplied with ``scale``, ``residual`` is added, ``softcap`` and ``clamp`` bound it, as in
    `LinearSpec`. ``packs``: y is packed for the next product. ``others``: (format, rows) of more
    matrices for the same x, each with its own y.

    ``mixture``: W (experts, rows, cols) and biases (experts, rows) are those of experts, ``batch``
    counts rows, and a tile of vectors is one of ``tile_of``; x has the vectors in the order of the
    list. So has y if it is packed, and zeros between those of two experts; after the last tile it
    stays as it was. Else y (pairs, rows) is in the order of rows and slots. The list must be
    complete when the launch before this one begins to write: see `Pack`, which waits for it.

    y[b] has the same bits whatever the other vectors are. Sums are taken in an order that ``cols``
    and the ``cut`` decide. Raises PtxgenError for F32 weights, a cut that does not fit, and an odd
    number of row groups of a gated product.
    """

    format: Format
    rows: int
    cols: int
    batch: int
    cut: PackedCut
    bias: bool | tuple[bool, ...] = False
    residual: bool = False
    gated: bool = False
    others: tuple[tuple[Format, int], ...] = ()
    activation: Activation | None = None
    scale: float = 1.0
    softcap: float = 0.0
    clamp: float = 0.0
    packs: bool = False
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        cut = self.cut
        if self.batch < 1 or (self.mixture is None and cut.vectors > GROUP * self.groups):
            raise PtxgenError(f"{self.name}: {self.batch} vectors in tiles of {cut.vectors}")
        if not takes_packed(self.formats):
            raise PtxgenError(f"{self.name}: not for F32 weights")
        if self.mixture is not None:
            self._check_mixture(self.mixture)
        if self.gated and (cut.row_groups % 2 or self.residual):
            raise PtxgenError(f"{self.name}: gated in pairs of row groups, without residual")
        if self.others and (self.gated or self.residual or self.packs):
            raise PtxgenError(f"{self.name}: other matrices without gate, residual and packing")
        if isinstance(self.bias, tuple) and len(self.bias) != len(self.formats):
            raise PtxgenError(f"{self.name}: bias {self.bias} of {len(self.formats)} matrices")
        check_ends(self)
        if self.shared_bytes > SM_NBYTES // cut.resident - CTA_COST:
            raise PtxgenError(f"{self.name}: {cut} takes {self.shared_bytes} bytes")
        if cut.used_registers > cut.registers:
            raise PtxgenError(f"{self.name}: {cut} leaves too few registers")

    def _check_mixture(self, mixture: Mixture) -> None:
        if mixture.height != self.cut.vectors:
            raise PtxgenError(f"{self.name}: tiles of {mixture.height} vectors, {self.cut}")
        if self.residual or self.others or not 1 <= mixture.used <= mixture.experts:
            raise PtxgenError(f"{self.name}: {mixture} without residual and other matrices")
        if self.rows % TILE_ROWS:
            raise PtxgenError(
                f"{self.name}: {self.rows} rows of an expert: a multiple of {TILE_ROWS}"
            )
        if mixture.weighted and self.packs:
            raise PtxgenError(f"{self.name}: packed vectors have no weights")
        if self.tiles > MAX_GRID:
            raise PtxgenError(f"{self.name}: {self.tiles} tiles are more than {MAX_GRID}")

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

    @property
    def vectors(self) -> int:
        """Vectors of x: places of the list of a mixture."""
        return self.batch if self.mixture is None else self.mixture.places(self.batch)

    @property
    def products(self) -> int:
        """Vectors that are multiplied with a matrix each: a mixture's pairs."""
        return self.batch * (1 if self.mixture is None else self.mixture.used)

    @property
    def tiles(self) -> int:
        """Tiles of vectors."""
        if self.mixture is not None:
            return self.mixture.tiles(self.batch)
        return ceil_div(self.groups * GROUP, self.cut.vectors)

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.parts[0].layout

    @property
    def pair(self) -> int:
        """Matrices that are multiplied together: two if gated."""
        return 2 if self.gated else 1

    @property
    def cta_rows(self) -> int:
        """Rows of y of a CTA."""
        return GROUP_ROWS * self.cut.row_groups // self.pair

    @cached_property
    def parts(self) -> tuple[PackedPart, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        parts: list[PackedPart] = []
        for number, (fmt, rows) in enumerate(((self.format, self.rows), *self.others)):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            ctas = self._row_tiles(rows)
            experts = 1 if self.mixture is None else self.mixture.experts
            layout = Layout(fmt, experts * rows, self.cols)
            parts.append(PackedPart(number, layout, first, ctas, experts))
        return tuple(parts)

    def _row_tiles(self, rows: int) -> int:
        """CTAs along the rows of a matrix. A packed y has whole tiles of 256 columns."""
        if self.packs:
            return ceil_div(packed_shape(1, rows)[0] * GROUP_ROWS, self.cta_rows)
        # Of 128 rows, 64 are every other band of 16, the first ones or the others.
        blocks, bands = divmod(ceil_div(rows, TILE_ROWS), 2 * BANDS)
        return ceil_div(GROUP_ROWS * (2 * blocks + min(bands, 2)), self.cta_rows)

    @cached_property
    def biases(self) -> tuple[bool, ...]:
        """Whether each matrix has a bias."""
        return self.bias if isinstance(self.bias, tuple) else (self.bias,) * len(self.formats)

    @property
    def f(self) -> Activation | None:
        """What the product goes through."""
        return self.activation or (Activation() if self.gated else None)

    @property
    def end_text(self) -> str:
        """What ``end`` is, for the template's contract."""
        return end_text(self)

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return ceil_div(self.vectors, GROUP)

    @property
    def slices(self) -> int:
        """Slices of x."""
        return packed_shape(1, self.cols)[0]

    @property
    def row_tiles(self) -> int:
        """Tiles of a row of weights."""
        return self.layout.row_tiles

    @property
    def reads_once(self) -> bool:
        """Whether a weight is read by one CTA."""
        return self.mixture is None and self.tiles == 1

    @property
    def x_in_one(self) -> bool:
        """Whether slices of x that follow each other are one run for a CTA: it has all vectors."""
        return self.mixture is None and self.groups * GROUP == self.cut.vectors

    # ---- shared memory: sums in the place of weights and activations ----

    @property
    def weight_nbytes(self) -> int:
        """Bytes of a stage of weights."""
        return max(ceil_div(self.cut.bands * part.stride, 128) * 128 for part in self.parts)

    @property
    def sum_stride(self) -> int:
        """f32 sums from a vector to the next: two vectors begin four banks apart."""
        return GROUP_ROWS * self.cut.row_groups + 2

    @property
    def split_nbytes(self) -> int:
        """Bytes of the sums of a split."""
        return 4 * self.cut.vectors * self.sum_stride

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        raise NotImplementedError

    # ---- parameters and reference ----

    @property
    def params(self) -> tuple[Param, ...]:
        mixture, y_shape = self.mixture, packed_shape(self.vectors, self.rows)
        params = [Param("x", "f16", packed_shape(self.vectors, self.cols), Access.IN)]
        if mixture is not None:
            params.append(Param("tile_of", "u32", ("tiles", 4), Access.IN))
            if not self.packs:
                params.append(Param("pair", "u32", ("vectors",), Access.IN))
            if mixture.weighted:
                params.append(Param("weight", "f32", ("products",), Access.IN))
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        for part in self.parts:
            n = part.suffix
            params.append(Param(f"weights{n}", "u8", (part.layout.nbytes,), Access.IN))
            if self.gated:
                params.append(Param("up", "u8", (part.layout.nbytes,), Access.IN))
            if self.biases[part.number]:
                shape = (part.rows,) if mixture is None else (mixture.experts, part.rows)
                params.append(Param(f"bias{n}", "f32", shape, Access.IN))
                if self.gated:
                    params.append(Param("up_bias", "f32", shape, Access.IN))
            if self.packs:
                access = Access.OUT if mixture is None else Access.INOUT
                params.append(Param("y", "f16", y_shape, access))
            else:
                params.append(Param(f"y{n}", "f32", ("products", part.rows), Access.OUT))
        return tuple(params)

    @property
    def tolerance(self) -> Tolerance:
        """Each rounding to f16 changes a number by up to 2^-11 of itself, and a weight may outweigh
        all others: it is rounded, and so are its scale and its minimum, if they are products; with
        a minimum, both are larger than the weight. A packed y is rounded once more, the error of a
        gate and of its other factor add up."""
        roundings = max(self._roundings(fmt) for fmt in self.formats)
        return Tolerance(rtol=2.0**-11 * (self.pair * roundings + self.packs) + 1e-5)

    @staticmethod
    def _roundings(fmt: Format) -> int:
        if fmt.is_float:
            return 1 if fmt.has_powers else 0
        return 1 + fmt.has("scale") + 2 * fmt.has_minimums

    def reference(self, **inputs: Any) -> dict[str, Array]:
        if self.mixture is not None:
            return {"y": self._of_experts(self.mixture, **inputs)}
        x = unpack(inputs["x"], self.batch, self.cols)
        outputs = {}
        for part in self.parts:
            n = part.suffix
            y = x @ part.layout.unpack(inputs[f"weights{n}"]).astype(np.float64).T
            if self.biases[part.number]:
                y += inputs[f"bias{n}"]
            up = None
            if self.gated:
                up = x @ self.layout.unpack(inputs["up"]).astype(np.float64).T
                up = up + inputs["up_bias"] if self.biases[0] else up
            y = self._ended(y, up, inputs.get("residual"))
            outputs[f"y{n}"] = pack(y) if self.packs else y.astype(np.float32)
        return outputs

    def _ended(self, y: Array, up: Array | None, residual: Array | None = None) -> Array:
        """What follows products and biases."""
        if self.f is not None:
            y = self.f(y) if up is None else self.f.gated(y, up)
        y = y * self.scale
        return bounded(y if residual is None else y + residual, self.softcap, self.clamp)

    def _of_experts(self, mixture: Mixture, **inputs: Any) -> Array:
        x = unpack(inputs["x"], self.vectors, self.cols)

        def product(name: str, expert: int, vectors: slice) -> Array:
            matrices = self.layout.unpack(inputs[name]).reshape(mixture.experts, self.rows, -1)
            made: Array = x[vectors] @ matrices[expert].astype(np.float64).T
            bias = "bias" if name == "weights" else "up_bias"
            return made + inputs[bias][expert] if self.biases[0] else made

        y = np.zeros((self.products, self.rows))
        if self.packs:
            y = unpack(inputs["y"], self.vectors, self.rows)
        for expert, first, count, _ in inputs["tile_of"].tolist():
            vectors = slice(first, first + count)
            up = product("up", expert, vectors) if self.gated else None
            made = self._ended(product("weights", expert, vectors), up)
            if self.packs:
                y[vectors] = made
                y[first + count : ceil_div(first + count, GROUP) * GROUP] = 0
                continue
            pair = inputs["pair"][vectors]
            y[pair] = made * inputs["weight"][pair, None] if mixture.weighted else made
        return pack(y) if self.packs else y.astype(np.float32)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{part.suffix}": part.layout for part in self.parts}
        layouts["up"] = self.layout
        inputs: dict[str, Any] = {}
        # What is bounded is as large as its bound, and its errors as large as the sums.
        scale = {"scale": 0.5 / self.cols**0.5} if self.f is not None and self.f.limit else {}
        if self.mixture is not None:
            m = self.mixture
            choice = random_choice(rng, self.batch, m.experts, m.used)
            lists = grouped(choice, m.experts, m.height, GROUP)
            inputs = {p.name: lists[p.name] for p in self.params if p.name in lists}
        for p in self.params:
            if p.name in inputs:
                continue
            if p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng, **scale))
            elif p.name == "x":
                inputs["x"] = pack(rng.standard_normal((self.vectors, self.cols)))
            elif p.access is Access.INOUT:
                inputs["y"] = pack(rng.standard_normal((self.vectors, self.rows)))
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.products * rows * self.cols * self.pair


def takes_packed(formats: tuple[Format, ...]) -> bool:
    """Whether there is such a product for weights of these types."""
    return all(fmt.element != "f32" for fmt in formats)
