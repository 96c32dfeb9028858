"""Feed-forward networks (FFNs), described: dense ones, mixtures of experts, routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Scoring, Selection

#: How experts are chosen at random, to measure: a share of all choices that the first half of them
#: have, see `SkewedLogits`, or as a trace does, see `memory.local_choices`.
RandomRouting = float | Literal["locality"]


@dataclass(frozen=True, slots=True)
class Dense:
    """down(f(gate x) * up x), or down(f(up x)) without a gate; see `Activation`.

    ``divisors`` (width,) divide the activated values (MPT), a ``norm`` normalises them (BitNet).
    With ``deviations`` the gates stay that are this many standard deviations above their mean, less
    that bound (Gemma 3n).
    """

    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    divisors: StoredVector | None = None
    norm: Normalization | None = None
    deviations: float | None = None

    @property
    def width(self) -> int:
        """Inner width: rows of up."""
        return self.up.rows


@dataclass(frozen=True, slots=True)
class Router:
    """The routing of tokens to experts, and the weights of the chosen ones.

    Scores of the logits are "softmax", "sigmoid", "sqrt_softplus", or the logits themselves, with a
    softmax over the chosen ones ("softmax_selected"), or over those near each of two
    ("sparsemixer", `Selection`).
    The ``used`` highest scores are chosen. ``choice_bias`` (experts,) is added for the choice only;
    a choice among groups takes the ``groups_used`` best of ``groups``, by the sum of a group's two
    best scores, or its best one (``by_best``). The chosen scores are the weights: divided by their
    sum (``normalize``), times ``scale``, times the expert's ``expert_scale`` (experts,).
    With ``shares`` this many experts share one network, see `Selection`.
    With ``by_token`` (vocabulary, used) the experts of a row are those of its token, and scores
    are their weights alone. ``by_logits`` chooses by logits. ``reads`` names the router's input:
    that of the FFN, that of the layer, or a norm of its own (``norm``).
    """

    linear: Linear
    used: int
    scoring: Scoring = "softmax"
    choice_bias: StoredVector | None = None
    groups: int = 1
    groups_used: int = 1
    normalize: bool = False
    scale: float = 1.0
    expert_scale: StoredVector | None = None
    by_logits: bool = False
    reads: Literal["input", "layer", "norm"] = "input"
    norm: Normalization | None = None
    norm_scale: float = 1.0  # multiplies the router's own norm
    by_best: bool = False
    shares: int = 1
    by_token: StoredVector | None = None

    @property
    def experts(self) -> int:
        """Number of experts' networks."""
        return self.linear.rows // self.shares

    @property
    def selection(self) -> Selection:
        """The selection of experts from logits, as its kernel takes it."""
        return Selection(
            self.linear.rows,
            self.used,
            self.scoring,
            normalised=self.normalize,
            scale=self.scale,
            bias=self.choice_bias is not None,
            by_logits=self.by_logits,
            groups=self.groups,
            groups_used=self.groups_used,
            expert_scale=self.expert_scale is not None,
            by_best=self.by_best,
            shares=self.shares,
        )


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts on a narrower vector: they read ``down`` x, and the mixture's result is ``up`` of the
    ``norm`` of their sum."""

    down: Linear
    up: Linear
    norm: Normalization | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts, and optionally a ``shared`` FFN for all tokens.

    The shared FFN is multiplied by sigmoid(``shared_gate`` x) if that is given. Matrices and biases
    of experts hold the rows of all experts, one after the other. ``weigh_input`` multiplies an
    expert's gate and up products with its weight instead of its result (Llama 4). With ``latent``
    experts, router and shared FFN still read x. ``chunks`` are further experts that read the sum y
    of the others, and y + ``chunk_scale`` * chunks(y) is the result; their router reads x.
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
    chunks: Mixture | None = None
    chunk_scale: float = 1.0

    @property
    def width(self) -> int:
        """Inner width: rows of up of one expert."""
        return self.up.rows // self.router.experts

    @property
    def result_width(self) -> int:
        """Output width: rows of down of one expert."""
        return self.down.rows // self.router.experts
