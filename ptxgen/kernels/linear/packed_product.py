"""What products of many packed activation vectors on tensor cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.ends import check_ends, end_text
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
        """Rows of the matrix."""
        return self.layout.rows

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")


@dataclass(frozen=True)
class PackedProduct(KernelSpec):
    """y[b] = W x[b] (+ bias) for packed f16 activations (`packed`), W (rows, cols) repacked.

    Weights are rounded to f16, P times (`Layout.powers`), in registers; products and sums are f32.
    ``gated``: y = f(W x + bias) (U x + up_bias), U (``up``) like W, f by default silu. Then y is
    multiplied with ``scale``, ``residual`` is added, ``softcap`` and ``clamp`` bound it, as in
    `LinearSpec`. ``packs``: y is packed for the next product. ``others``: (format, rows) of more
    matrices for the same x, each with its own y.

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

    def __post_init__(self) -> None:
        cut = self.cut
        if self.batch < 1 or cut.vectors > GROUP * self.groups:
            raise PtxgenError(f"{self.name}: {self.batch} vectors in tiles of {cut.vectors}")
        if not takes_packed(self.formats):
            raise PtxgenError(f"{self.name}: not for F32 weights")
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

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

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
            parts.append(PackedPart(number, Layout(fmt, rows, self.cols), first, ctas))
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
        return ceil_div(self.batch, GROUP)

    @property
    def slices(self) -> int:
        """Slices of x."""
        return packed_shape(1, self.cols)[0]

    @property
    def row_tiles(self) -> int:
        """Tiles of a row of weights."""
        return self.layout.row_tiles

    @property
    def vector_tiles(self) -> int:
        """CTAs along the vectors."""
        return ceil_div(self.groups * GROUP, self.cut.vectors)

    @property
    def x_in_one(self) -> bool:
        """Whether slices of x that follow each other are one run for a CTA: it has all vectors."""
        return self.groups * GROUP == self.cut.vectors

    # ---- shared memory: sums in the place of weights and activations ----

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
        shape = packed_shape(self.batch, self.cols)
        params = [Param("x", "f16", shape, Access.IN)]
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        for part in self.parts:
            n = part.suffix
            params.append(Param(f"weights{n}", "u8", (part.layout.nbytes,), Access.IN))
            if self.gated:
                params.append(Param("up", "u8", (part.layout.nbytes,), Access.IN))
            if self.biases[part.number]:
                params.append(Param(f"bias{n}", "f32", (part.rows,), Access.IN))
                if self.gated:
                    params.append(Param("up_bias", "f32", (part.rows,), Access.IN))
            if self.packs:
                params.append(Param("y", "f16", packed_shape(self.batch, self.rows), Access.OUT))
            else:
                params.append(Param(f"y{n}", "f32", ("batch", part.rows), Access.OUT))
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
        x = unpack(inputs["x"], self.batch, self.cols)
        outputs = {}
        for part in self.parts:
            n = part.suffix
            y = x @ part.layout.unpack(inputs[f"weights{n}"]).astype(np.float64).T
            if self.biases[part.number]:
                y += inputs[f"bias{n}"]
            if self.f is not None and self.gated:
                up = x @ self.layout.unpack(inputs["up"]).astype(np.float64).T
                y = self.f.gated(y, up + inputs["up_bias"] if self.biases[0] else up)
            elif self.f is not None:
                y = self.f(y)
            y *= self.scale
            if self.residual:
                y += inputs["residual"]
            y = bounded(y, self.softcap, self.clamp)
            outputs[f"y{n}"] = pack(y) if self.packs else y.astype(np.float32)
        return outputs

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{part.suffix}": part.layout for part in self.parts}
        layouts["up"] = self.layout
        inputs: dict[str, Any] = {}
        for p in self.params:
            if p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng))
            elif p.name == "x":
                inputs["x"] = pack(rng.standard_normal((self.batch, self.cols)))
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.batch * rows * self.cols * self.pair


def takes_packed(formats: tuple[Format, ...]) -> bool:
    """Whether there is such a product for weights of these types."""
    return all(fmt.element != "f32" for fmt in formats)
