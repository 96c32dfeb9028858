"""What linear kernels for few rows share: their fields, parameters and reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import ELEMENTWISE, Bounded, Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.reference import completed, multiply
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Prologue, check_steps, stored
from urdir.ptxgen.ptx.architecture import ARCHITECTURES
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, Param, ceil_div
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import Layout, random_weights

#: The steps after products of matrices, in this order; main loops add those that only they take.
EPILOGUES: tuple[type[Epilogue], ...] = (Bias, Adapted, Gated, *ELEMENTWISE, Residual, Bounded)
#: Activation vectors of one launch at most: the columns of an ``mma`` tile.
MAX_BATCH = 8
#: SMs of a big GPU, for which a launch is cut.
SMS = 132
#: Bytes of shared memory that a CTA takes by default: every GPU has as many.
SHARED_NBYTES = min(architecture.shared_per_cta for architecture in ARCHITECTURES.values())


def side_by_side(layouts: Sequence[Layout], cta_rows: Sequence[int]) -> tuple[Part, ...]:
    """The matrices as parts of a grid, one after the other; a CTA takes ``cta_rows`` of each."""
    parts: list[Part] = []
    for number, (layout, rows) in enumerate(zip(layouts, cta_rows, strict=True)):
        first = parts[-1].first_cta + parts[-1].ctas if parts else 0
        parts.append(Part(number, layout, first, ceil_div(layout.rows, rows)))
    return tuple(parts)


@dataclass(frozen=True)
class LinearSpec(Product):
    """y[b] = W x[b], W (rows, cols) repacked, for ``batch`` activation vectors: a main loop between
    steps.

    x goes through the steps of the ``prologue`` first, a product through those of the ``epilogue``,
    in order. ``others``: (format, rows) of more matrices for the same x, each with its own y. A
    `Gated` epilogue takes the products of a pair of matrices, W and ``up``.

    Raises PtxgenError for steps that the product does not take (``prologues``, ``epilogues``).
    """

    format: Format
    rows: int
    cols: int
    prologue: tuple[Prologue, ...] = ()
    epilogue: tuple[Epilogue, ...] = ()
    others: tuple[tuple[Format, int], ...] = ()

    prologues: ClassVar[tuple[type[Prologue], ...]] = (Normed,)
    epilogues = EPILOGUES

    #: Subclasses have this as a field, or take one vector.
    batch = 1
    #: The most vectors.
    most_batch: ClassVar[int] = MAX_BATCH

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise PtxgenError(f"{self.name}: a matrix of {self.rows} x {self.cols}: both from 1")
        if not 1 <= self.batch <= self.most_batch:
            raise PtxgenError(f"{self.name}: batch is {self.batch}: 1 to {self.most_batch}")
        for name, value in field_values(self).items():
            if isinstance(value, int) and value < 0:
                raise PtxgenError(f"{self.name}: {name} is {value}: 0 chooses by shape")
        _ = self.layouts  # refuses columns that are no whole blocks
        check_steps(self)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """How the weights of each matrix with a product of its own lie in memory."""
        matrices = ((self.format, self.rows), *self.others)
        return tuple(Layout(fmt, rows, self.cols) for fmt, rows in matrices)

    @property
    def layout(self) -> Layout:
        """How the (first) weights lie in memory."""
        return self.layouts[0]

    # ---- parameters and reference ----

    @property
    def params(self) -> tuple[Param, ...]:
        """The first matrix' weights and x, then weights, bias and y of each matrix in turn, and the
        parameters of steps (`Step.leads`)."""
        first = self.weights_of(self.parts[0])
        params = [Param(name, "u8", (self.layout.nbytes,), Access.IN) for name in first]
        params.append(Param("x", "f32", ("batch", "cols"), Access.IN))
        params += [p for step in self.steps if step.leads for p in step.params(self)]
        for part in self.parts:
            if part.number:
                weights = Param(f"weights{part.suffix}", "u8", (part.layout.nbytes,), Access.IN)
                params.append(weights)
            params += [p for step in self.epilogue_of(part) for p in step.part_params(self, part)]
            params.append(Param(f"y{part.suffix}", "f32", ("batch", part.rows), Access.OUT))
        params += [p for step in self.steps if not step.leads for p in step.params(self)]
        return stored(self, params)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return multiply(self, inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        named = {name: part.layout for part in self.parts for name in self.weights_of(part)}
        weights = {name: random_weights(layout, rng) for name, layout in named.items()}
        return completed(self, weights, rng)

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        of_steps = {p.name for step in self.steps for p in step.params(self)}
        own = sum(self.nbytes(p) for p in self.params if p.name not in of_steps)
        powers = sum(layout.powers_nbytes for layout in self.layouts)
        up = self.layout.powers_nbytes if self.steps.gated else 0
        return own - powers - up + sum(step.bytes_moved(self) for step in self.steps)

    def flops(self) -> int:
        rows = sum(part.rows for part in self.parts)
        return 2 * self.batch * rows * self.cols * self.steps.pair


def odd_cols(fmt: Format) -> int:
    """Columns for an example: few, and as odd as the type allows."""
    return 37 if fmt.is_float else fmt.block * 9 % 1536
