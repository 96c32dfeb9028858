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
