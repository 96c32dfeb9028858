"""Feed-forward networks, described: dense ones, and mixtures of experts with their routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Selection


@dataclass(frozen=True, slots=True)
class Dense:
    """down(f(gate x) * up x), or down(f(up x)) without a gate; see `Activation`.

    ``divisors`` (width,) divide the activated values (MPT).
    """

    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    divisors: StoredVector | None = None

    @property
    def width(self) -> int:
        """Rows of up."""
        return self.up.rows


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token goes to, and with which weights.

    Scores of the experts' logits: "softmax", "sigmoid", or the logits themselves, whose softmax
    over the chosen ones is taken ("softmax_selected"). Chosen are the ``used`` highest scores (with
    ``choice_bias`` (experts,) added for the choice only; from the ``groups_used`` best of
    ``groups`` groups, by the sum of a group's two best). Their scores are the weights: divided by
    their sum (``normalize``), times ``scale``, times the expert's own ``expert_scale`` (experts,).
    ``by_logits`` chooses by logits. ``reads``: what the logits are made of: the network's input,
    the layer's input as it is, or a norm of its own (``norm``).
    """

    linear: Linear
    used: int
    scoring: Literal["softmax", "sigmoid", "softmax_selected"] = "softmax"
    choice_bias: StoredVector | None = None
    groups: int = 1
    groups_used: int = 1
    normalize: bool = False
    scale: float = 1.0
    expert_scale: StoredVector | None = None
    by_logits: bool = False
    reads: Literal["input", "layer", "norm"] = "input"
    norm: Normalization | None = None
    norm_scale: float = 1.0  # of the router's own norm

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.linear.rows

    @property
    def selection(self) -> Selection:
        """How logits choose."""
        return Selection(
            self.experts,
            self.used,
            self.scoring,
            normalised=self.normalize,
            scale=self.scale,
            bias=self.choice_bias is not None,
            by_logits=self.by_logits,
            groups=self.groups,
            groups_used=self.groups_used,
            expert_scale=self.expert_scale is not None,
        )


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts of a narrower vector: they read ``down`` x, and ``up`` of the ``norm`` of their sum
    is the mixture's result."""

    down: Linear
    up: Linear
    norm: Normalization | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts: the weighted sum of some experts, and a ``shared`` network of all
    tokens, times sigmoid(``shared_gate`` x) where it has one.

    Matrices of experts have the rows of all experts, one after the other; their biases likewise.
    ``weigh_input`` multiplies an expert's gate and up products with its weight instead of its
    result (Llama 4). The experts may be ``latent`` ones; router and shared network read x itself.
    """

    router: Router
    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    weigh_input: bool = False
    shared: Dense | None = None
    shared_gate: Linear | None = None
    latent: LatentExperts | None = None

    @property
    def width(self) -> int:
        """Rows of up of one expert."""
        return self.up.rows // self.router.experts

    @property
    def result_width(self) -> int:
        """Rows of down of one expert."""
        return self.down.rows // self.router.experts
