"""Mixtures of experts on the device: what `experts` appends launches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.selection import Selection

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.graph.experts import Experts, Route
    from urdir.model.lower.lowering import Lowering


@dataclass(frozen=True, slots=True)
class RouterLayer:
    """A router on the device: its ``matrix`` (experts, hidden), perhaps with a bias, and vectors
    (experts,) f32 where the ``selection`` has them. ``scale`` multiplies products before the bias.
    """

    selection: Selection
    matrix: Matrix
    choice_bias: Slice | None = None
    expert_scale: Slice | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, at: Lowering, route: Route) -> RouterLayer:
        """That of an operation."""
        router = route.router
        return cls(
            route.selection,
            at.matrix(router.linear),
            None if router.choice_bias is None else at.vector(router.choice_bias),
            None if router.expert_scale is None else at.vector(router.expert_scale),
            router.norm_scale,
        )


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """The matrices of an expert that all rows have, of the types and sizes of the others."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """The experts on the device. The matrices have the rows of all experts, one after the other,
    and so have their biases. Without a ``gate``, down(f(up x)). ``weigh_input``: an expert's weight
    multiplies its gate and up products, not its result (Llama 4). With ``slots`` the matrices have
    this many of the experts. The register ``number`` says where each pair's expert is; with a
    ``state`` products look up there which slot has it. The ``shared`` expert stands beside the
    chosen ones, as the last of a row.
    """

    selection: Selection
    up: Matrix
    down: Matrix
    gate: Matrix | None
    activation: Activation
    weigh_input: bool = False
    slots: int = 0
    number: str = "expert"
    state: Slice | None = None
    shared: SharedLayer | None = None

    @property
    def used(self) -> int:
        """Experts of a row."""
        return self.selection.used + (self.shared is not None)

    @classmethod
    def of(cls, at: Lowering, experts: Experts) -> MixtureLayer:
        """Those of an operation."""
        return cls(
            experts.selection,
            at.matrix(experts.up),
            at.matrix(experts.down),
            None if experts.gate is None else at.matrix(experts.gate),
            experts.activation,
            experts.weigh_input,
        )

    @property
    def held(self) -> int:
        """How many experts the matrices have."""
        return self.slots or self.selection.experts

    @property
    def numbered(self) -> int:
        """How many experts are numbered: all of them where products look them up."""
        return self.held if self.state is None else self.selection.experts

    @property
    def cache(self) -> Held | None:
        """Where products look experts up, if they do."""
        experts, used = self.selection.experts, self.selection.used
        return None if self.state is None else Held(experts, used, self.slots)

    @property
    def width(self) -> int:
        """Values between the matrices of an expert."""
        return self.up.rows // self.held

    @property
    def hidden(self) -> int:
        """Values of a result."""
        return self.down.rows // self.held
