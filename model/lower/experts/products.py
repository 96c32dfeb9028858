"""What the ways of multiplying rows with their experts have in common: which products there are,
and what comes after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import alike
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.combine import CombineExperts
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.lower.registers import Registers

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(Activate)
_combine = lru_cache(maxsize=64)(CombineExperts)
_normalise = lru_cache(maxsize=64)(Normalise)


@dataclass(frozen=True, slots=True)
class MixtureCall:
    """A mixture to compute: y = residual + the weighted sum of the chosen experts for x after the
    ``norm``, all (rows, hidden) f32; y is another buffer. Labels of launches begin with ``label``.
    """

    label: str
    mixture: MixtureLayer
    x: Slice
    norm: NormLayer | None
    residual: Slice | None
    y: Slice

    def after_norm(self, at: Lowering, rows: int) -> MixtureCall:
        """The same after a launch of its own for the norm, if there is one."""
        if self.norm is None:
            return self
        norm, normed, cols = self.norm, at.work["normed"], self.mixture.up.cols
        kernel, label = _normalise(rows, cols, norm.norm), f"{self.label}.norm"
        at.launch(kernel, label, x=self.x, y=normed, weight=norm.weight, bias=norm.bias)
        at.completed = None
        return replace(self, x=normed, norm=None)


@dataclass(frozen=True, slots=True)
class Product:
    """What a launch multiplies: a matrix of all experts, perhaps with the ``up`` matrix of a gated
    pair; then comes the activation, if there is one."""

    name: str
    matrix: Matrix
    up: Matrix | None = None
    activation: Activation | None = None

    @property
    def arguments(self) -> dict[str, Slice]:
        """The matrices and their biases, by parameter name."""
        first = without_none(weights=self.matrix.data, bias=self.matrix.bias)
        return (
            first
            if self.up is None
            else first | without_none(up=self.up.data, up_bias=self.up.bias)
        )


#: Appends a product with this label, whose result goes there.
Multiply = Callable[[str, Product, "Slice"], None]


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """Launches of products of ``rows`` vectors."""

    at: Lowering
    rows: int

    @property
    def work(self) -> Registers:
        """The intermediates."""
        return self.at.work

    def append_activated(self, call: MixtureCall, multiply: Multiply) -> None:
        """``work["expert gate"]`` = f(gate x) * up x, without a gate f(up x), for each pair of a
        row and its experts."""
        gate, up = self.work["expert gate"], self.work["expert up"]
        mixture = call.mixture
        first, *second = first_products(mixture)
        multiply(f"{call.label}_{first.name}", first, gate)
        if second:
            multiply(f"{call.label}_{second[0].name}", second[0], up)
            values = self.rows * mixture.selection.used * mixture.width
            kernel = _activate(values, mixture.activation, gated=True)
            label = f"{call.label}.activation"
            self.at.plan.launch(kernel, label, y=gate, gate=gate, up=up)

    def append_combined(self, call: MixtureCall, slots: int) -> None:
        """y = residual + the sum of the slots of ``work["expert out"]``."""
        residual = call.residual
        kernel = _combine(self.rows, slots, call.mixture.hidden, residual is not None)
        label, x = f"{call.label}.combine", self.work["expert out"]
        self.at.plan.launch(kernel, label, x=x, y=call.y, **without_none(residual=residual))


def first_products(mixture: MixtureLayer) -> list[Product]:
    """What is multiplied before the down matrices: a gate and up in one launch if it can."""
    gate, up, f = mixture.gate, mixture.up, mixture.activation
    if gate is None:
        return [Product("up", up, activation=f)]
    if alike(gate, up):
        return [Product("gate_up", gate, up, f)]
    return [Product("gate", gate), Product("up", up)]
