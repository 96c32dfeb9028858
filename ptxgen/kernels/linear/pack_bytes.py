"""Activations as signed bytes with a scale a vector, normalised first if there is a norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.pack import MAX_THREADS, NORMED_ROWS, TILE_THREADS
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.target import since
from urdir.ptxgen.weights import e4m3
from urdir.ptxgen.weights.eights import MOST, bytes_shape, pack_bytes, pack_e4m3
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape, unpack


@dataclass(frozen=True)
class PackBytes(KernelSpec):
    """x (rows, cols) f32 as bytes in the order of `eights`, and what a byte of each vector stands
    for; or as E4M3 numbers (``element``), and what 1 stands for. With a ``norm`` the normalised
    rows, with its ``weight`` and ``bias`` (cols,) f32. ``packed``, without a norm: x is f16 as
    products of f16 take it (`packed`).

    A vector with an infinity or a NaN gets a scale that is one, so that no product of it is finite.
    Raises PtxgenError for more columns than a CTA holds (`can_pack`).
    """

    rows: int
    cols: int
    norm: Norm | None = None
    packed: bool = False
    element: Literal["s8", "e4m3"] = "s8"

    name = "pack_bytes"
    template = ("urdir.templates", "linear/pack_bytes.ptx.j2")

    def __post_init__(self) -> None:
        if self.rows < 1 or not self.can_pack(self.cols):
            most = TILE_COLS * MAX_THREADS // TILE_THREADS
            raise PtxgenError(
                f"pack_bytes: {self.rows} rows of {self.cols}: up to {most} columns, a multiple of "
                "four"
            )

        if self.norm and self.packed:
            raise PtxgenError("pack_bytes: no norm of what is packed")

    @staticmethod
    def can_pack(cols: int) -> bool:
        """Whether a CTA holds a row of this many columns."""
        fits = 1 <= ceil_div(cols, TILE_COLS) <= MAX_THREADS // TILE_THREADS
        return cols % 4 == 0 and fits

    @property
    def targets(self) -> tuple[str, ...]:
        return since(89 if self.element == "e4m3" else 80)

    @property
    def params(self) -> tuple[Param, ...]:
        norm = self.norm
        x = Param("x", "f32", ("rows", "cols"), Access.IN)
        if self.packed:
            x = Param("x", "f16", packed_shape(self.rows, self.cols), Access.IN)
        given = (
            (True, x),
            (norm and norm.weight, Param("weight", "f32", ("cols",), Access.IN)),
            (norm and norm.bias, Param("bias", "f32", ("cols",), Access.IN)),
            (True, Param("y", self.stored, bytes_shape(self.rows, self.cols), Access.OUT)),
            (True, Param("scales", "f32", ("launched",), Access.OUT)),
        )
        return tuple(param for present, param in given if present)

    @property
    def stored(self) -> str:
        """The type of y's elements in memory."""
        return "s8" if self.element == "s8" else "u8"

    @property
    def most(self) -> int:
        """The largest number."""
        return MOST if self.element == "s8" else e4m3.MOST

    @property
    def launched(self) -> int:
        """Vectors that a launch writes."""
        return GROUP * self.groups

    @property
    def tiles(self) -> int:
        """Tiles of 256 columns."""
        return ceil_div(self.cols, TILE_COLS)

    @property
    def groups(self) -> int:
        """Groups of eight vectors."""
        return ceil_div(self.rows, GROUP)

    @property
    def cta_rows(self) -> int:
        """Rows of a CTA, in neighbouring lanes."""
        return min(NORMED_ROWS, self.chunks * MAX_THREADS // (TILE_THREADS * self.tiles))

    @property
    def chunks(self) -> int:
        """Runs of sixteen columns of a thread: two where whole sectors can be read and written."""
        most = TILE_THREADS * NORMED_ROWS * self.tiles
        return 2 if self.packed and self.tiles % 2 == 0 and most > MAX_THREADS else 1

    @property
    def warps(self) -> int:
        """Warps of a CTA; the last may have threads without columns."""
        return ceil_div(self.row_threads * self.cta_rows, 32)

    @property
    def row_threads(self) -> int:
        """Threads of a row that have columns."""
        return TILE_THREADS * self.tiles // self.chunks

    @property
    def has_idle(self) -> bool:
        """Whether some threads have no columns."""
        return self.cta_rows * self.row_threads < 32 * self.warps

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape((self.launched // self.cta_rows, 1, 1), (32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Bit for bit, but that a byte may be rounded otherwise after a norm."""
        step = 9 if self.element == "e4m3" else 1.01  # of bytes: 0x38 and 0x37 are 1 and 15 / 16
        return Tolerance(rtol=step / MOST if self.norm else 0)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = unpack(inputs["x"], self.rows, self.cols) if self.packed else inputs["x"]
        if self.norm is not None:
            x = self.norm(x, inputs.get("weight"), inputs.get("bias"))
        y, scales = pack_bytes(x) if self.element == "s8" else pack_e4m3(x)
        return {"y": y, "scales": np.pad(scales, (0, self.launched - self.rows))}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Vectors of unlike size, some of zeros; rows of a layer norm have means other than 0."""
        inputs = super().make_inputs(rng)
        if self.packed:
            return {"x": pack(4 * rng.standard_normal((self.rows, self.cols)))}
        inputs["x"] *= np.exp(rng.standard_normal((self.rows, 1))).astype(np.float32)
        if self.norm is None:
            inputs["x"][rng.integers(self.rows)] = 0
        elif self.norm.kind == "layer":
            inputs["x"] += rng.standard_normal((self.rows, 1)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, PackBytes]:
        rms, layer = Norm("rms", 1e-5), Norm("layer", 1e-5, bias=True)
        return {
            "one": cls(1, 4),
            "odd": cls(9, 260),
            "vectors": cls(16, 512),
            "8448 columns": cls(3, 8448),
            "packed": cls(9, 288, packed=True),
            "E4M3": cls(9, 260, element="e4m3"),
            "packed E4M3": cls(9, 288, packed=True, element="e4m3"),
            "rms E4M3": cls(8, 512, rms, element="e4m3"),
            "packed, two runs a thread": cls(11, 8704, packed=True),
            "rms": cls(8, 256, rms),
            "rms of odd rows": cls(11, 1284, rms),
            "rms without weight": cls(3, 20, Norm("rms", 0.1, weight=False)),
            "layer": cls(16, 1280, layer),
        }

    def flops(self) -> int:
        return (8 if self.norm else 3) * self.launched * self.cols
