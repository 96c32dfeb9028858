"""Main loops of products, between the steps of a prologue and an epilogue."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from urdir.ptxgen.kernels.linear.epilogue.activation import ELEMENTWISE, Bounded, Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed
from urdir.ptxgen.kernels.linear.steps import (
    Epilogue,
    Part,
    Product,
    Prologue,
    Reference,
    Step,
    check_order,
)
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Array

#: The steps after products of matrices, in this order; main loops add those that only they take.
EPILOGUES: tuple[type[Epilogue], ...] = (Bias, Adapted, Gated, *ELEMENTWISE, Residual, Bounded)


class MainLoop(Product):
    """A product between the steps of its ``prologue``, which x goes through, and of its
    ``epilogue``, which the product goes through.
    """

    #: The steps that the main loop takes, in this order.
    prologues: ClassVar[tuple[type[Prologue], ...]] = ()
    epilogues: ClassVar[tuple[type[Epilogue], ...]] = ()

    @classmethod
    def of(cls, *fields: Any, **named: Any) -> Self:
        """A product whose steps stand, in order, among its other ``fields``."""
        for name, kind in (("prologue", Prologue), ("epilogue", Epilogue)):
            if steps := tuple(step for step in fields if isinstance(step, kind)):
                named[name] = steps
        return cls(*(field for field in fields if not isinstance(field, Step)), **named)

    @classmethod
    def in_order(cls, *steps: Step) -> tuple[Step, ...]:
        """The steps in the order of the main loop; those that it does not take last."""
        order = (*cls.prologues, *cls.epilogues)
        places = {kind: place for place, kind in enumerate(order)}
        return tuple(sorted(steps, key=lambda step: places.get(type(step), len(order))))

    def check_steps(self, epilogues: tuple[type[Epilogue], ...] = ()) -> None:
        """Raise PtxgenError for a step that the product does not take, or not in this order;
        ``epilogues`` are those that it takes, if not all of its class."""
        check_order(self.name, self.prologue, self.prologues)
        check_order(self.name, self.epilogue, epilogues or self.epilogues)
        for step in self.fused:
            step.check(self)

    # ---- what main loops and callers ask about the steps ----

    def weights_of(self, part: Part) -> tuple[str, ...]:
        """The parameters of the matrices of a part."""
        return (f"weights{part.suffix}", "up")[: self.pair]

    def multiplied(
        self, inputs: dict[str, Any], outputs: dict[str, Array], part: Part | None = None
    ) -> Array:
        """The vectors that the weights of a part, or of the first one, multiply, f64."""
        x: Array = inputs["x"]
        for step in self.prologue:
            x = step.apply(x, Reference(self, part or self.parts[0], inputs, outputs))
        return x.astype(np.float64)

    @property
    def norm(self) -> Norm | None:
        """The norm that the launch computes."""
        step = self.find(Normed)
        return None if step is None else step.norm

    @property
    def normed(self) -> bool:
        """Whether x is normalised, by this launch or by the one before as well."""
        return self.norm is not None or self.has(BegunNorm)
