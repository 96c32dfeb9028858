"""Matrix products (GEMM) of many activation vectors with repacked weights, on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.plain import plain_epilogue
from urdir.ptxgen.kernels.linear.products.gemm_tile import TILE, CtaTile
from urdir.ptxgen.kernels.linear.spec import Part
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, UNIT, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout


@dataclass(frozen=True)
class Gemm(Product):
    """Matrix product y[b] = W x[b] (+ bias) on tensor cores, W (rows, cols) of any type, repacked.

    It serves many rows where no product of packed activations does (`packed_choice.packs`): on
    sm_75, with F32 weights, and with F16 and BF16 where a CTA has 99 KB of shared memory (sm_86,
    sm_89, sm_120).

    Weights (unpacked in f32) and activations are rounded to f16, products and sums are f32. Values
    above 65504 become infinite. Those below 6e-5 become multiples of 6e-8, an error of at most
    3e-8, which is nothing beside weights and activations of usual size. Therefore BF16 weights are
    rounded to f16, too: bf16 products would round the activations to 8 bits.
    y[b] has the same bits whatever the rest of the batch is.

    ``activation``, ``scale``, ``softcap`` and ``clamp``: its epilogue (`plain_epilogue`).
    """

    format: Format
    rows: int
    cols: int
    batch: int
    bias: bool = False
    activation: Activation | None = None
    scale: float = 1.0
    softcap: float = 0.0
    clamp: float = 0.0

    name = "gemm"
    template = ("urdir.templates", "linear/products/gemm.ptx.j2")

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PtxgenError(f"gemm: batch is {self.batch}, it must be at least 1")
        if ceil_div(self.layout.rows, self.cut.rows) > 65535:
            raise PtxgenError(f"gemm: {self.rows} rows are more than 65535 tiles")
        for step in self.epilogue:
            step.check(self)
        if 4 * self.batch * self.cols >= 2**32:
            raise PtxgenError(f"gemm: {self.batch} x {self.cols} activations exceed 4 GiB")

    @cached_property
    def epilogue(self) -> tuple[Epilogue, ...]:
        return plain_epilogue(
            self.bias,
            activation=self.activation,
            scale=self.scale,
            softcap=self.softcap,
            clamp=self.clamp,
        )

    @cached_property
    def layout(self) -> Layout:
        """How the weights lie in memory."""
        return Layout(self.format, self.rows, self.cols)

    @property
    def params(self) -> tuple[Param, ...]:
        bias = (Param("bias", "f32", ("rows",), Access.IN),) if self.bias else ()
        return (
            Param("weights", "u8", ("weight_nbytes",), Access.IN),
            Param("x", "f32", ("batch", "cols"), Access.IN),
            *bias,
            Param("y", "f32", ("batch", "rows"), Access.OUT),
        )

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the repacked matrix."""
        return self.layout.nbytes

    @property
    def cut(self) -> CtaTile:
        """What a CTA computes."""
        return TILE

    @property
    def steps(self) -> int:
        """Steps in which a CTA goes through the columns."""
        return self.cut.steps(self.layout)

    @property
    def depth(self) -> int:
        """Steps that loads run ahead."""
        return self.cut.steps_ahead(self.layout)

    @property
    def launch_shape(self) -> LaunchShape:
        tile = self.cut
        grid = (ceil_div(self.batch, tile.batch), ceil_div(self.rows, tile.rows), 1)
        return LaunchShape(grid=grid, block=(tile.threads, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Rounding of both operands to f16, 2^-11 each at most: a sum of n products of independent
        errors is off by about 2^-12 of its own standard deviation, of which max|y| is 2 to 4.
        """
        return Tolerance(rtol=1e-3)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = self.layout.unpack(inputs["weights"]).astype(np.float64)
        y = inputs["x"].astype(np.float64) @ weights.T
        part = Part(0, self.layout, 0, 1)
        for step in self.epilogue:
            y = step.apply(y, Reference(self, part, inputs, {}))
        return {"y": y.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        blocks = random_blocks(self.format, self.rows * self.cols // self.format.block, rng)
        inputs = {
            "weights": self.layout.pack(blocks),
            "x": rng.standard_normal((self.batch, self.cols)).astype(np.float32),
        }
        if self.bias:
            inputs["bias"] = rng.standard_normal(self.rows).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, Gemm]:
        odd = {f: 37 if f.is_float else f.block * 9 % 1536 for f in FORMATS.values()}
        each = {
            f.name: cls(f, 33, cols, 9 + i, bias=i % 2 == 0)
            for i, (f, cols) in enumerate(odd.items())
        }
        q8, q4_k, f16 = FORMATS["Q8_0"], FORMATS["Q4_K"], FORMATS["F16"]
        return {
            "few rows": cls(q8, 8, UNIT, 9),
            **each,
            "tiles": cls(q4_k, 130, 256, 129),
            "F16 odd": cls(f16, 31, 70, 20, bias=True),
            "gelu": cls(q8, 34, 96, 17, bias=True, activation=Activation("gelu")),
            "silu": cls(f16, 33, 64, 9, activation=Activation("silu"), scale=0.5),
            "capped": cls(q8, 40, 64, 10, scale=0.25, softcap=20.0, clamp=16.0),
            "F32 aligned": cls(FORMATS["F32"], 130, 132, 64),
        }

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        return super().bytes_moved() - self.layout.powers_nbytes

    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.cols
