"""Matrix products (GEMM) of many packed activation vectors, on Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.ends import check_ends, end_text
from urdir.ptxgen.kernels.pairs import grouped, most_places, most_tiles, random_choice
from urdir.ptxgen.kernels.rescale import bounded
from urdir.ptxgen.ptx.architecture import SM_REGISTERS
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout
from urdir.ptxgen.weights.packed import (
    GROUP,
    GROUP_NBYTES,
    TILE_SLICES,
    pack,
    packed_shape,
    unpack,
)

#: Rows of a warpgroup's operand A, and bands that they come from.
WARPGROUP, OPERAND_ROWS = 128, 64
BANDS = OPERAND_ROWS // TILE_ROWS
#: Bytes of shared memory of an SM for its CTAs, each of which costs 1 KB more.
SM_NBYTES, CTA_COST = 228 << 10, 1 << 10
#: CTAs of a grid along y.
MAX_GRID = 65535
#: Registers of a thread beside sums.
OTHER_REGISTERS = 64


@dataclass(frozen=True, slots=True)
class WgmmaCut:
    """How a CTA computes its part of y: 64 * ``row_groups`` rows of weights, ``vectors``
    activation vectors.

    ``row_groups`` * ``splits`` warpgroups multiply. Those of a split take every ``splits``-th tile
    of the columns. ``cluster`` CTAs share the columns, each with a run of tiles. Weights come
    ``weight_stages`` tiles ahead for each split, activations ``x_stages`` stages of ``x_slices``
    slices. ``resident``: CTAs of an SM.
    """

    row_groups: int
    vectors: int
    splits: int = 1
    cluster: int = 1
    weight_stages: int = 3
    x_stages: int = 3
    x_slices: int = 1
    resident: int = 1

    def __post_init__(self) -> None:
        if (
            not 1 <= self.row_groups * self.splits <= 4
            or self.vectors % GROUP
            or not GROUP <= self.vectors <= 256
            or TILE_SLICES % self.x_slices
            or (self.splits > 1 and self.x_slices < TILE_SLICES)
            or not 1 <= self.cluster <= 8
            or min(self.weight_stages, self.x_stages) < 1
        ):
            raise PtxgenError(f"{self} is no cut of a product")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return self.row_groups * self.splits

    @property
    def threads(self) -> int:
        """Threads of the CTA: a warpgroup more, which issues copies."""
        return WARPGROUP * (self.warpgroups + 1)

    @property
    def registers(self) -> int:
        """Registers of a thread. With ``setmaxnreg`` warpgroups that multiply could take some from
        the one that copies, but the driver's linker ignores it (advice C7504)."""
        return min(SM_REGISTERS // (self.threads * self.resident) // 8 * 8, 248)

    @property
    def x_nbytes(self) -> int:
        """Bytes of a stage of activations."""
        return self.x_slices * self.vectors // GROUP * GROUP_NBYTES

    @property
    def operands(self) -> int:
        """Bands of a stage of weights."""
        return BANDS * self.row_groups


@dataclass(frozen=True, slots=True)
class WgmmaPart:
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
class GemmWgmma(KernelSpec):
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
    cut: WgmmaCut
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

    name = "gemm_wgmma"
    template = ("urdir.templates", "gemm_wgmma.ptx.j2")

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def __post_init__(self) -> None:
        if self.batch < 1 or (self.mixture is None and self.cut.vectors > GROUP * self.groups):
            raise PtxgenError(f"gemm_wgmma: {self.batch} vectors in tiles of {self.cut.vectors}")
        if any(fmt.element == "f32" for fmt in self.formats):
            raise PtxgenError("gemm_wgmma: not for F32 weights")
        if self.mixture is not None:
            self._check_mixture(self.mixture)
        if self.gated and (self.cut.row_groups % 2 or self.residual):
            raise PtxgenError("gemm_wgmma: gated in pairs of row groups, without residual")
        if self.others and (self.gated or self.residual or self.packs):
            raise PtxgenError("gemm_wgmma: other matrices without gate, residual and packing")
        if isinstance(self.bias, tuple) and len(self.bias) != len(self.formats):
            raise PtxgenError(f"gemm_wgmma: bias {self.bias} of {len(self.formats)} matrices")
        check_ends(self)
        if self.shared_bytes > SM_NBYTES // self.cut.resident - CTA_COST:
            raise PtxgenError(f"gemm_wgmma: {self.cut} takes {self.shared_bytes} bytes")
        if self.cut.vectors // 2 + OTHER_REGISTERS > self.cut.registers:
            raise PtxgenError(f"gemm_wgmma: {self.cut} leaves too few registers")

    def _check_mixture(self, mixture: Mixture) -> None:
        if mixture.height != self.cut.vectors:
            raise PtxgenError(f"gemm_wgmma: tiles of {mixture.height} vectors, {self.cut}")
        if self.residual or self.others or not 1 <= mixture.used <= mixture.experts:
            raise PtxgenError(f"gemm_wgmma: {mixture} without residual and other matrices")
        if self.rows % TILE_ROWS:
            raise PtxgenError(
                f"gemm_wgmma: {self.rows} rows of an expert: a multiple of {TILE_ROWS}"
            )
        if mixture.weighted and self.packs:
            raise PtxgenError("gemm_wgmma: packed vectors have no weights")
        if self.tiles > MAX_GRID:
            raise PtxgenError(f"gemm_wgmma: {self.tiles} tiles are more than {MAX_GRID}")

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
        return OPERAND_ROWS * self.cut.row_groups // self.pair

    @cached_property
    def parts(self) -> tuple[WgmmaPart, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        parts: list[WgmmaPart] = []
        for number, (fmt, rows) in enumerate(((self.format, self.rows), *self.others)):
            first = parts[-1].first_cta + parts[-1].ctas if parts else 0
            ctas = self._row_tiles(rows)
            experts = 1 if self.mixture is None else self.mixture.experts
            layout = Layout(fmt, experts * rows, self.cols)
            parts.append(WgmmaPart(number, layout, first, ctas, experts))
        return tuple(parts)

    def _row_tiles(self, rows: int) -> int:
        """CTAs along the rows of a matrix. A packed y has whole tiles of 256 columns."""
        if self.packs:
            return ceil_div(packed_shape(1, rows)[0] * OPERAND_ROWS, self.cta_rows)
        # Of 128 rows, 64 are every other band of 16, the first ones or the others.
        blocks, bands = divmod(ceil_div(rows, TILE_ROWS), 2 * BANDS)
        return ceil_div(OPERAND_ROWS * (2 * blocks + min(bands, 2)), self.cta_rows)

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

    # ---- shared memory: rings of weights and activations, barriers; sums in the rings' place ----

    @property
    def weight_nbytes(self) -> int:
        """Bytes of a stage of weights."""
        return max(ceil_div(self.cut.operands * part.stride, 128) * 128 for part in self.parts)

    @property
    def weight_slots(self) -> int:
        """Stages of weights of all splits: split k has every ``splits``-th, from k on."""
        return self.cut.splits * self.cut.weight_stages

    @property
    def x_slots(self) -> int:
        """Stages of activations of all splits."""
        return self.cut.splits * self.cut.x_stages

    @property
    def x_at(self) -> int:
        """Where stages of activations begin."""
        return self.weight_slots * self.weight_nbytes

    @property
    def sum_stride(self) -> int:
        """f32 sums from a vector to the next: two vectors begin four banks apart."""
        return OPERAND_ROWS * self.cut.row_groups + 2

    @property
    def split_nbytes(self) -> int:
        """Bytes of the sums of a split."""
        return 4 * self.cut.vectors * self.sum_stride

    @property
    def barriers_at(self) -> int:
        """Where barriers begin: full ones of both rings, then empty ones, 8 bytes each."""
        rings = self.x_at + self.x_slots * self.cut.x_nbytes
        return max(rings, self.cut.splits * self.split_nbytes + 7 & -8)

    @property
    def slots(self) -> int:
        """Stages of both rings."""
        return self.weight_slots + self.x_slots

    @property
    def pairs_at(self) -> int:
        """Where pair and weight of each vector lie, 8 bytes, of a mixture that goes down."""
        return self.barriers_at + 16 * self.slots

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory."""
        goes_down = self.mixture is not None and not self.packs
        return self.pairs_at + (8 * self.cut.vectors if goes_down else 0)

    @property
    def launch_shape(self) -> LaunchShape:
        cut = self.cut
        rows, tiles = self.parts[-1].first_cta + self.parts[-1].ctas, self.tiles
        # Tiles beyond the last come last, and those of one expert read their x at a time.
        across, down = (tiles, rows) if self.mixture is None else (rows, tiles)
        return LaunchShape(
            grid=(cut.cluster * across, down, 1),
            block=(cut.threads, 1, 1),
            cluster=(cut.cluster, 1, 1),
            shared_bytes=self.shared_bytes,
            resident=cut.resident,
        )

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

    @classmethod
    def examples(cls) -> Mapping[str, GemmWgmma]:
        return dict(_examples(cls))

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.products * rows * self.cols * self.pair


def _examples(cls: type[GemmWgmma]) -> Iterator[tuple[str, GemmWgmma]]:
    q8, q4_k, q6_k, f16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))
    small = WgmmaCut(1, 8, weight_stages=2, x_stages=2)
    yield "smallest", cls(q8, 8, 32, 1, small)
    types = [fmt for fmt in FORMATS.values() if fmt.element != "f32"]
    for i, fmt in enumerate(types):
        cols = 290 if fmt.is_float else max(fmt.block, 288 // fmt.block * fmt.block)
        yield fmt.name, cls(fmt, 70, cols, 3 + i % 6, small, bias=i % 2 == 0)
    yield "large tile", cls(q4_k, 200, 512, 201, WgmmaCut(2, 192))
    yield "splits", cls(q4_k, 130, 1280, 17, WgmmaCut(1, 24, splits=4, x_slices=4, x_stages=1))
    yield (
        "cluster",
        cls(q6_k, 65, 1280, 20, WgmmaCut(1, 24, 2, 2, x_slices=4, x_stages=2), residual=True),
    )
    yield "gated", cls(q4_k, 96, 512, 30, WgmmaCut(2, 16), gated=True, packs=True)
    yield "packed", cls(q8, 96, 288, 9, replace(small, vectors=16), bias=True, packs=True)
    yield (
        "three matrices",
        cls(q4_k, 192, 256, 12, replace(small, vectors=16), others=((q6_k, 33), (f16, 64))),
    )
    yield (
        "ends",
        cls(
            q8,
            64,
            256,
            8,
            small,
            bias=True,
            activation=Activation("gelu"),
            scale=0.05,
            softcap=20.0,
        ),
    )
    oai = Activation("swiglu_oai", limit=1.5)
    yield (
        "experts up",
        cls(
            q4_k,
            48,
            512,
            11,
            WgmmaCut(2, 16, weight_stages=2, x_stages=2),
            gated=True,
            packs=True,
            mixture=Mixture(7, 2, 16),
        ),
    )
    yield (
        "experts up, biases",
        cls(
            q8,
            80,
            288,
            21,
            WgmmaCut(2, 32, 2, 1, 1, 1, x_slices=4),
            bias=True,
            gated=True,
            packs=True,
            activation=oai,
            mixture=Mixture(3, 1, 32),
        ),
    )
    yield (
        "experts without gate",
        cls(
            f16,
            32,
            70,
            5,
            replace(small, vectors=16),
            packs=True,
            activation=Activation("relu2"),
            mixture=Mixture(9, 2, 16),
        ),
    )
    yield (
        "experts down",
        cls(
            q6_k,
            80,
            256,
            23,
            replace(small, vectors=16),
            bias=True,
            mixture=Mixture(5, 2, 16, weighted=True),
        ),
    )
    yield (
        "experts down, splits and cluster",
        cls(
            q8,
            144,
            1056,
            40,
            WgmmaCut(2, 64, 2, 2, 1, 1, x_slices=4),
            mixture=Mixture(3, 2, 64),
        ),
    )
    yield (
        "experts with one row each",
        cls(
            q4_k,
            32,
            256,
            1,
            replace(small, vectors=16),
            mixture=Mixture(12, 4, 16, weighted=True),
        ),
    )
