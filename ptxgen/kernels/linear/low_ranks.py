"""Products of small float matrices, each with vectors of its own, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, Layout, random_weights

THREADS = 128
#: Columns of a matrix at most: a lane has the weights of its row in registers.
MAX_COLS = 4096
#: Vectors of a CTA, at most, and the bytes of shared memory that they may have.
MAX_VECTORS, SHARED_NBYTES = 4, 48 * 1024
#: Columns from which on a warp has one row, and not four.
WIDE = 1024
_FORMATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SmallPart:
    """y = W f(x) (+ bias), W (rows, cols)."""

    format: Format
    rows: int
    cols: int
    f: Activation | None = None
    bias: bool = False

    @property
    def layout(self) -> Layout:
        """How the weights lie in memory."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that share a row."""
        return 32 if self.cols >= WIDE else 8

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA."""
        return THREADS // self.lanes

    @property
    def groups(self) -> int:
        """Groups of four columns of a lane."""
        return self.cols // (4 * self.lanes)

    def group_nbytes(self, number: int) -> int:
        """Bytes from a lane's first group of its row to group ``number``: rows lie by tiles."""
        tile, column = divmod(4 * self.lanes * number, TILE_COLS)
        return self.value_nbytes * (tile * TILE_ROWS * TILE_COLS + column)

    @property
    def band_nbytes(self) -> int:
        """Bytes of 16 rows."""
        return self.value_nbytes * TILE_ROWS * TILE_COLS * self.layout.row_tiles

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row of a tile."""
        return self.value_nbytes * TILE_COLS

    @property
    def value_nbytes(self) -> int:
        """Bytes of a weight."""
        return 4 if self.format.name == "F32" else 2


@dataclass(frozen=True)
class LowRanks(KernelSpec):
    """y<i> = W<i> f<i>(x<i>) (+ bias<i>) for each of the ``parts`` and each of ``batch`` vectors,
    f32.

    A CTA has up to `MAX_VECTORS` of them, so that weights are read again for more, mostly from the
    L2 cache.
    """

    parts: tuple[SmallPart, ...]
    batch: int = 1

    name = "low_ranks"

    def __post_init__(self) -> None:
        if not self.parts or not all(self.serves(p.format, p.rows, p.cols) for p in self.parts):
            shapes = ", ".join(f"{p.format.name} {p.rows} x {p.cols}" for p in self.parts)
            raise PtxgenError(
                f"low_ranks: {shapes}: matrices of {', '.join(_FORMATS)} with multiples of 32 "
                f"columns (128 from {WIDE} on) up to {MAX_COLS}"
            )
        if self.batch < 1:
            raise PtxgenError(f"low_ranks: {self.batch} vectors")

    @staticmethod
    def serves(fmt: Format, rows: int, cols: int) -> bool:
        """Whether a matrix can be a part."""
        step = 128 if cols >= WIDE else 32
        return fmt.name in _FORMATS and rows >= 1 and 0 < cols <= MAX_COLS and cols % step == 0

    @property
    def first_ctas(self) -> Sequence[int]:
        """The first CTA of each part, and the number of all."""
        return [0, *accumulate(ceil_div(p.rows, p.cta_rows) for p in self.parts)]

    @property
    def params(self) -> tuple[Param, ...]:
        found: list[Param] = []
        for i, part in enumerate(self.parts):
            found += [
                Param(f"weights{i}", "u8", (part.layout.nbytes,), Access.IN),
                Param(f"x{i}", "f32", ("batch", part.cols), Access.IN),
            ]
            found += [Param(f"bias{i}", "f32", (part.rows,), Access.IN)] if part.bias else []
            found.append(Param(f"y{i}", "f32", ("batch", part.rows), Access.OUT))
        return tuple(found)

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.first_ctas[-1], ceil_div(self.batch, self.vectors), 1)
        return LaunchShape(grid=grid, block=(THREADS, 1, 1))

    @property
    def vectors(self) -> int:
        """Vectors of a CTA."""
        return min(self.batch, MAX_VECTORS, SHARED_NBYTES // (4 * self.most_cols))

    @property
    def most_cols(self) -> int:
        """Columns of the widest part, whose x is in shared memory."""
        return max(part.cols for part in self.parts)

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=5e-6, atol=5e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        found = {}
        for i, part in enumerate(self.parts):
            x = inputs[f"x{i}"].astype(np.float64)
            x = x if part.f is None else part.f(x)
            y = x @ part.layout.unpack(inputs[f"weights{i}"]).astype(np.float64).T
            y = y + inputs[f"bias{i}"] if part.bias else y
            found[f"y{i}"] = y.astype(np.float32)
        return found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        for i, part in enumerate(self.parts):
            inputs[f"weights{i}"] = random_weights(part.layout, rng)
            inputs[f"x{i}"] = rng.standard_normal((self.batch, part.cols)).astype(np.float32)
            if part.bias:
                inputs[f"bias{i}"] = rng.standard_normal(part.rows).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, LowRanks]:
        f32, f16, bf16 = (FORMATS[name] for name in _FORMATS)
        tanh, sigmoid = Activation("tanh"), Activation("sigmoid")
        up = (SmallPart(f32, 70, 96, tanh, True), SmallPart(f16, 33, 256, sigmoid))
        return {
            "up": cls((*up, SmallPart(bf16, 16, 64, bias=True))),
            "down": cls((SmallPart(f32, 9, 1280), SmallPart(f16, 5, 1152), SmallPart(bf16, 7, 96))),
            "one": cls((SmallPart(f32, 3, 32),)),
            "three vectors": cls((*up, SmallPart(f32, 9, 1280)), batch=3),
            "odd vectors": cls((SmallPart(bf16, 16, 64, bias=True), up[1]), batch=9),
            "wide vectors": cls((SmallPart(f16, 3, 4096, tanh), SmallPart(f32, 2, 32)), batch=4),
            "more than a tile": cls((SmallPart(f16, 21, 544, sigmoid), SmallPart(f32, 1, 288))),
        }

    def bytes_moved(self) -> int:
        """Without the columns that fill up tiles."""
        weights = sum(p.value_nbytes * p.rows * p.cols for p in self.parts)
        vectors = sum(4 * self.batch * (p.rows + p.cols) for p in self.parts)
        return weights + vectors + sum(4 * p.rows for p in self.parts if p.bias)

    def flops(self) -> int:
        return sum(2 * self.batch * p.rows * p.cols for p in self.parts)
