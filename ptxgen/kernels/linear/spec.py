"""What linear kernels for few rows share: their fields, parameters and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.ends import Ends, check_ends, end_text, is_first
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rescale import bounded
from urdir.ptxgen.ptx.architecture import ARCHITECTURES
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.formats import Format, random_blocks
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.packed_few import Order

#: Activation vectors of one launch at most: the columns of an ``mma`` tile.
MAX_BATCH = 8
#: SMs of a big GPU, for which a launch is cut.
SMS = 132
#: Bytes of shared memory that a CTA takes by default: every GPU has as many.
SHARED_NBYTES = min(architecture.shared_per_cta for architecture in ARCHITECTURES.values())


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices of a launch: names of its registers, and the CTAs that work on it."""

    number: int
    layout: Layout
    first_cta: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.layout.rows

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")

    @property
    def weights(self) -> str:
        """Register with the matrix's address."""
        return f"%weights{self.suffix}"

    @property
    def bias(self) -> str:
        """Register with the address of its bias."""
        return f"%bias{self.suffix}"

    @property
    def y(self) -> str:
        """Register with the address of its product."""
        return f"%y{self.suffix}"


def side_by_side(layouts: Sequence[Layout], cta_rows: Sequence[int]) -> tuple[Part, ...]:
    """The matrices as parts of a grid, one after the other; a CTA takes ``cta_rows`` of each."""
    parts: list[Part] = []
    for number, (layout, rows) in enumerate(zip(layouts, cta_rows, strict=True)):
        first = parts[-1].first_cta + parts[-1].ctas if parts else 0
        parts.append(Part(number, layout, first, ceil_div(layout.rows, rows)))
    return tuple(parts)


@dataclass(frozen=True)
class LinearSpec(Ends):
    """y[b] = W x[b] (+ bias), W (rows, cols) repacked, for ``batch`` activation vectors.

    ``norm``: x is normalised first. ``activation``: y = f(W x + bias), ``gated``: f(W x + bias)
    (U x + up_bias), U (``up``) like W, f by default silu. Then, in this order, y is multiplied with
    ``scale``, ``residual`` is added, and ``softcap`` and ``clamp`` bound it (`Rescale`).

    ``others``: (format, rows) of more matrices for the same x, each with its own y. ``bias`` is a
    tuple where only some of all matrices have one.
    """

    format: Format
    rows: int
    cols: int
    bias: bool | tuple[bool, ...] = False
    norm: Norm | None = None
    residual: bool = False
    gated: bool = False
    others: tuple[tuple[Format, int], ...] = ()
    activation: Activation | None = None
    scale: float = 1.0
    softcap: float = 0.0
    clamp: float = 0.0

    #: Subclasses have this as a field, or take one vector.
    batch = 1
    #: See `GemmSmall`, which has these as fields; others have neither summaries nor packed vectors.
    summarised = False
    summarises = False
    packed = False
    packs = cast("Order | None", None)

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise PtxgenError(f"{self.name}: a matrix of {self.rows} x {self.cols}: both from 1")
        if not 1 <= self.batch <= MAX_BATCH:
            raise PtxgenError(f"{self.name}: batch is {self.batch}: 1 to {MAX_BATCH}")
        for name, value in self.fields().items():
            if isinstance(value, int) and value < 0:
                raise PtxgenError(f"{self.name}: {name} is {value}: 0 chooses by shape")
        has_one_output = self.gated or self.residual
        if (self.gated and self.residual) or (self.others and has_one_output):
            raise PtxgenError(f"{self.name}: gated goes without residual, others without both")
        if isinstance(self.bias, tuple) and len(self.bias) != 1 + len(self.others):
            raise PtxgenError(
                f"{self.name}: bias is {self.bias} of {1 + len(self.others)} matrices"
            )
        check_ends(self)
        _ = self.layouts  # refuses columns that are no whole blocks

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """How the weights of each matrix with a product of its own lie in memory."""
        matrices = ((self.format, self.rows), *self.others)
        return tuple(Layout(fmt, rows, self.cols) for fmt, rows in matrices)

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.layouts[0]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The matrices with a product of their own, side by side in the grid."""
        raise NotImplementedError

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

    @property
    def total_rows(self) -> int:
        """Rows of all products."""
        return self.rows + sum(rows for _, rows in self.others)

    @property
    def norm_first(self) -> bool:
        """Whether the norm must be complete before the product."""
        return self.norm is not None and is_first(self.norm)

    @property
    def f(self) -> Activation | None:
        """What the product goes through."""
        return self.activation or (Activation() if self.gated else None)

    @cached_property
    def biases(self) -> tuple[bool, ...]:
        """Whether each matrix has a bias."""
        if isinstance(self.bias, tuple):
            return self.bias
        return (self.bias,) * (1 + len(self.others))

    @property
    def is_bounded(self) -> bool:
        """Whether y may be smaller than the sums that it is made of, and their rounding."""
        return bool(self.softcap or self.clamp)

    @property
    def ends_apart(self) -> bool:
        """Whether something stands between bias and residual, or the bias is one of two."""
        return any(self.biases) and (self.f is not None or self.scale != 1)

    def biases_of(self, part: Part) -> tuple[tuple[str, str], ...]:
        """Registers for values, and with the address, of each bias of a part's product."""
        if not self.biases[part.number]:
            return ()
        up = (("%up_bias_of", "%up_bias"),) if self.gated else ()
        return (("%bias_of", part.bias), *up)

    @property
    def end_text(self) -> str:
        """What ``end`` and more is, for a template's contract."""
        return end_text(self)

    @property
    def has_minimums(self) -> bool:
        """Whether some matrix' groups have an additive term."""
        return any(fmt.has_minimums for fmt in self.formats)

    @property
    def params(self) -> tuple[Param, ...]:
        """The first matrix' x, weights and y, then weights, bias and y of the others."""
        params = [Param("weights", "u8", (self.layout.nbytes,), Access.IN)]
        if self.gated:
            params.append(Param("up", "u8", (self.layout.nbytes,), Access.IN))
        params.append(Param("x", "f32", ("batch", "cols"), Access.IN))
        params += self.norm_params
        if self.residual:
            params.append(Param("residual", "f32", ("batch", "rows"), Access.IN))
        for part in self.parts:
            if part.number:
                weights = Param(f"weights{part.suffix}", "u8", (part.layout.nbytes,), Access.IN)
                params.append(weights)
            if self.biases[part.number]:
                params.append(Param(f"bias{part.suffix}", "f32", (part.rows,), Access.IN))
                if self.gated:
                    params.append(Param("up_bias", "f32", (part.rows,), Access.IN))
            params.append(Param(f"y{part.suffix}", "f32", ("batch", part.rows), Access.OUT))
        return tuple(params)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = self.multiplied(**inputs)
        outputs = {}
        for part in self.parts:
            y = x @ part.layout.unpack(inputs[f"weights{part.suffix}"]).astype(np.float64).T
            if self.biases[part.number]:
                y += inputs[f"bias{part.suffix}"]
            if self.f is not None and self.gated:
                up = x @ self.layout.unpack(inputs["up"]).astype(np.float64).T
                y = self.f.gated(y, up + inputs["up_bias"] if self.bias else up)
            elif self.f is not None:
                y = self.f(y)
            y *= self.scale * self.factor(inputs)
            if self.residual:
                y += inputs["residual"]
            y = bounded(y, self.softcap, self.clamp)
            outputs[f"y{part.suffix}"] = y.astype(np.float32)
        return outputs

    def factor(self, inputs: Mapping[str, Any]) -> float:
        """What y is multiplied with beside the scale."""
        return 1.0

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        layouts = {f"weights{part.suffix}": part.layout for part in self.parts}
        if self.gated:
            layouts["up"] = self.layout
        inputs: dict[str, Any] = {}
        for p in self.params:
            if p.name in layouts:
                layout = layouts[p.name]
                count = layout.rows * layout.cols // layout.format.block
                inputs[p.name] = layout.pack(random_blocks(layout.format, count, rng))
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        powers = sum(layout.powers_nbytes for layout in self.layouts)
        up = self.layout.powers_nbytes if self.gated else 0
        return super().bytes_moved() - powers - up

    def flops(self) -> int:
        return 2 * self.batch * self.total_rows * self.cols * self.pair


def odd_cols(fmt: Format) -> int:
    """Columns for an example: few, and as odd as the type allows."""
    return 37 if fmt.is_float else fmt.block * 9 % 1536
