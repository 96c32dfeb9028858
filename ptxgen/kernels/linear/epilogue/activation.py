"""Nonlinearities, factors and bounds of a product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.steps import Epilogue, Product, Reference
from urdir.ptxgen.kernels.rescale import bounded
from urdir.ptxgen.spec import Access, Array, Param


@dataclass(frozen=True, slots=True)
class Activated(Epilogue):
    """y = f(y)."""

    f: Activation

    stem = "activation"

    @staticmethod
    def by(f: Activation, divisors: object = None) -> tuple[Activated, ...] | None:
        """The step; None with ``divisors``."""
        return (Activated(f),) if divisors is None else None

    @property
    def nonlinearity(self) -> Activation:
        return self.f

    @property
    def text(self) -> str:
        return f"f: {self.f.kind}"

    def check(self, product: Product) -> None:
        if self.f.limit or self.f.kind == "swiglu_oai":
            raise PtxgenError(
                f"{product.name}: {self.f.kind} with limit {self.f.limit} is for gated products"
            )

    def apply(self, y: Array, of: Reference) -> Array:
        return self.f(y)


@dataclass(frozen=True, slots=True)
class Gated(Epilogue):
    """y = f(W x) (U x): the product is of a pair of matrices, U (``up``) is like W."""

    f: Activation = field(default_factory=Activation)

    stem = "gated"

    @property
    def nonlinearity(self) -> Activation:
        return self.f

    @property
    def text(self) -> str:
        return f"f: {self.f.kind}"

    def check(self, product: Product) -> None:
        if product.others:
            raise PtxgenError(f"{product.name}: gated is for one pair of matrices")

    def apply(self, y: Array, of: Reference) -> Array:
        return self.f.gated(y[0], y[1])


@dataclass(frozen=True, slots=True)
class SigmoidScaled(Epilogue):
    """y is multiplied with sigmoid(``gain`` (1,) f32)."""

    stem = "sigmoid_scaled"

    @property
    def text(self) -> str:
        return "* sigmoid(gain), gain: (1) f32"

    def check(self, product: Product) -> None:
        if any(product.steps.has(kind) for kind in (Bias, Activated, Gated)):
            raise PtxgenError(
                f"{product.name}: sigmoid_scaled goes without bias, activation and gate"
            )

    def params(self, product: Product) -> tuple[Param, ...]:
        return (Param("gain", "f32", (1,), Access.IN),)

    def apply(self, y: Array, of: Reference) -> Array:
        return y / (1.0 + math.exp(-of.inputs["gain"][0]))


@dataclass(frozen=True, slots=True)
class Scaled(Epilogue):
    """y is multiplied with a number."""

    factor: float

    stem = "scale"

    @staticmethod
    def by(factor: float) -> tuple[Scaled, ...]:
        """The step; none if the factor is 1."""
        return (Scaled(factor),) if factor != 1 else ()

    @property
    def text(self) -> str:
        return f"* {self.factor}"

    def apply(self, y: Array, of: Reference) -> Array:
        return self.factor * y


@dataclass(frozen=True, slots=True)
class Bounded(Epilogue):
    """y is bounded: smoothly by a ``softcap``, cut off at a ``clamp`` (`Rescale`); 0 is none."""

    softcap: float = 0.0
    clamp: float = 0.0

    stem = "bounds"

    @staticmethod
    def within(softcap: float = 0.0, clamp: float = 0.0) -> tuple[Bounded, ...]:
        """The step; none if both are 0."""
        return (Bounded(softcap, clamp),) if softcap or clamp else ()

    @property
    def text(self) -> str:
        steps = [
            *([f"soft cap {self.softcap}"] if self.softcap else []),
            *([f"within {self.clamp}"] if self.clamp else []),
        ]
        return ", ".join(steps)

    def check(self, product: Product) -> None:
        if not (self.softcap >= 0 and self.clamp >= 0):
            raise PtxgenError(
                f"{product.name}: softcap {self.softcap}, clamp {self.clamp}: 0 is none"
            )

    def apply(self, y: Array, of: Reference) -> Array:
        return bounded(y, self.softcap, self.clamp)


#: What each number of a product may go through before a residual is added, in this order.
ELEMENTWISE: tuple[type[Epilogue], ...] = (Activated, Scaled)
#: Operations on each number of a product, by name, in the order in which they may follow it: what
#: makes their steps of their values, None where products have none.
OPERATIONS: Mapping[str, Callable[..., tuple[Epilogue, ...] | None]] = {
    "activate": Activated.by,
    "scale": Scaled.by,
    "bound": Bounded.within,
}
