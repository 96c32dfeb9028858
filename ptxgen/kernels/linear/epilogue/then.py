"""A recurrent kernel that consumes a product in the same launch.

The thread with the sum of a row updates the state of that row's channel: one launch in place of
two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.steps import Epilogue, Part, Product, Reference
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import Access, Array, Param

Then = CausalConv | SelectiveScan

#: The parameter that the product replaces.
TAKES = {CausalConv: "x", SelectiveScan: "step", DraftedScan: "step"}
#: The most values of a channel's state in a thread's registers, which also hold as many rates.
MOST_VALUES = 16
PREFIX = "then_"


@dataclass(frozen=True, slots=True)
class Continued(Epilogue):
    """A recurrent ``kernel`` of one token consumes the first product. y is its output; its other
    parameters are named with `PREFIX`."""

    kernel: Then

    stem = "then"

    @property
    def shared_nbytes(self) -> int:
        return 0 if isinstance(self.kernel, CausalConv) else 8 * self.kernel.size  # b and c

    @property
    def text(self) -> str:
        return f"{self.kernel.name} of one token takes the first product; then_...: its arguments"

    def check(self, product: Any) -> None:
        then, rows = self.kernel, product.rows
        if then.rows != 1 or then.segments or then.channels != rows:
            raise PtxgenError(
                f"{product.name}: {then.name} of {then.channels} channels, {then.rows} rows in "
                f"{then.segments} segments after a product of {rows} rows: one token of as many "
                "channels"
            )
        if isinstance(then, CausalConv) and then.gated:
            raise PtxgenError(f"{product.name}: a gated convolution takes more than a product")
        if isinstance(then, CausalConv | DraftedScan) and then.drafted:
            raise PtxgenError(f"{product.name}: {then.name} of drafts takes more rows")
        if not has_registers(then):
            raise PtxgenError(
                f"{product.name}: states of more than {MOST_VALUES} values after a product"
            )
        if product.steps.has(Gated) or product.steps.has(Residual) or product.cut.rows.passes > 1:
            raise PtxgenError(
                f"{product.name}: {then.name} after a product with gate or residual, or in passes"
            )

    def of_part(self, product: Product, part: Part) -> bool:
        return part.number == 0

    def params(self, product: Product) -> tuple[Param, ...]:
        return tuple(
            replace(p, name=PREFIX + p.name, shape=self.kernel.shape_of(p))
            for p in self.kernel.params
            if p.name not in (TAKES[type(self.kernel)], "y")
        )

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        names = {p.name for p in self.params(product) if p.access is not Access.OUT}
        inputs = {PREFIX + name: value for name, value in self.kernel.make_inputs(rng).items()}
        return {name: inputs[name] for name in names}

    def apply(self, y: Array, of: Reference) -> Array:
        own = {
            name.removeprefix(PREFIX): value
            for name, value in of.inputs.items()
            if name.startswith(PREFIX)
        }
        taken = {TAKES[type(self.kernel)]: y.astype(np.float32)}
        made = self.kernel.reference(**own, **taken)
        result = made.pop("y")
        of.outputs.update({PREFIX + name: value for name, value in made.items()})
        return result


def has_registers(then: Then) -> bool:
    """Whether a thread's registers hold all of a channel's state."""
    return isinstance(then, CausalConv) or then.size <= MOST_VALUES
