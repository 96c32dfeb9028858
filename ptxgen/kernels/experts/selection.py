"""How a router chooses experts by logits: the description that kernels and models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Array

#: The most experts of a layer, and of a row: a lane of a warp has the number of one.
MAX_EXPERTS, MAX_USED = 512, 32
#: What the sum of a row's weights is at least before they are divided by it: the smallest f16.
LEAST_SUM = 6.103515625e-5

Scoring = Literal["softmax", "sigmoid", "softmax_selected", "sqrt_softplus", "sparsemixer"]
SCORINGS = ("softmax", "sigmoid", "softmax_selected", "sqrt_softplus", "sparsemixer")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which ``used`` of ``experts`` a row takes, and with which weights.

    1. Every logit becomes a score: its softmax over all experts, its sigmoid, the square root of
       its softplus; with "softmax_selected" the logit itself.
    2. The choice goes by the score (by the logit if ``by_logits``), plus a ``bias`` per expert.
    3. With ``groups`` (neighbouring experts, a group's value is the sum of its two best choices,
       or ``by_best`` its best one) only the experts of the ``groups_used`` best groups can be
       chosen.
    4. The ``used`` best are taken, the best first. Among equals lower numbers come first.
    5. A weight is the score without the bias; with "softmax_selected" the softmax over the chosen.
       ``normalised``: divided by their sum, which counts as 6.1e-5 at least. Then times ``scale``,
       and times a number per expert if ``expert_scale``.

    "sparsemixer" (Liu et al. 2024, arXiv 2409.12136, section 3) takes two: the best logit, then the
    best of the others. The weight of either is its softmax over the logits s that are left and with
    (best - s) / max(|s|, best) at most ``near``.

    With ``shares`` this many neighbouring experts share one network (Grove MoE): the results are
    the numbers of networks, a chosen one's quotient by ``shares``, weighted by the score of the
    expert with that number, as llama.cpp does. A network may be chosen twice.

    The order of these is that of llama.cpp's llm_graph_context::build_moe_ffn.
    """

    experts: int
    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    scale: float = 1.0
    bias: bool = False
    by_logits: bool = False
    groups: int = 1
    groups_used: int = 1
    expert_scale: bool = False
    by_best: bool = False
    near: float = 0.02
    shares: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise PtxgenError(f"scoring is {self.scoring!r}: one of {', '.join(SCORINGS)}")
        if not 1 <= self.used <= min(self.experts, MAX_USED) or self.experts > MAX_EXPERTS:
            raise PtxgenError(
                f"{self.used} of {self.experts} experts: 1 to {MAX_USED} of {MAX_EXPERTS} at most"
            )
        plain = not self.bias and self.groups == 1 and not self.normalised
        if self.scoring == "sparsemixer" and not (plain and self.used == 2):
            raise PtxgenError("a sparse mixer takes two experts by their logits alone")
        if self.experts % self.shares or (self.shares > 1 and self.expert_scale):
            raise PtxgenError(f"{self.shares} of {self.experts} experts cannot share a network")
        if self.groups == 1:
            return
        if not 1 <= self.groups_used <= self.groups or self.experts % self.groups:
            raise PtxgenError(
                f"{self.groups_used} of {self.groups} groups of {self.experts} experts: "
                f"groups of the same size, some of them"
            )
        if self.group_experts < 2 or self.groups > 32:
            raise PtxgenError(f"{self.groups} groups: 32 at most, each of two experts at least")
        if self.groups_used * self.group_experts < self.used:
            raise PtxgenError(
                f"{self.groups_used} groups of {self.group_experts} experts are fewer than the "
                f"{self.used} experts of a row"
            )

    @property
    def group_experts(self) -> int:
        """Experts of a group."""
        return self.experts // self.groups

    @property
    def chooses_by_logits(self) -> bool:
        """Whether logits are in the order of the choice: what scores are is not needed for it."""
        plain = self.scoring == "softmax" and not self.bias and self.groups == 1
        by_logits = self.scoring in ("softmax_selected", "sparsemixer")
        return self.by_logits or by_logits or plain

    @property
    def is_plain(self) -> bool:
        """Whether a warp chooses by logits alone, and nothing but these has a part in weights."""
        softmax = self.scoring in ("softmax", "softmax_selected")
        return softmax and not self.bias and self.groups == 1 and not self.expert_scale

    def scores(self, logits: Array) -> Array:
        """The scores of logits (rows, experts), f64."""
        logits = np.asarray(logits, np.float64)
        match self.scoring:
            case "softmax":
                return _softmax(logits)
            case "sigmoid":
                return 1.0 / (1.0 + np.exp(-logits))
            case "softmax_selected" | "sparsemixer":
                return logits
            case "sqrt_softplus":
                return np.sqrt(np.logaddexp(0.0, logits))

    def __call__(
        self, logits: Array, bias: Array | None = None, expert_scale: Array | None = None
    ) -> tuple[Array, Array]:
        """Expert (rows, used) u32 and weight (rows, used) f64 for logits (rows, experts)."""
        scores = self.scores(logits)
        choice = np.asarray(logits, np.float64) if self.chooses_by_logits else scores
        if bias is not None:
            choice = choice + bias
        if self.groups > 1:
            choice = np.where(self._allowed(choice), choice, -np.inf)
        expert = np.argsort(-choice, axis=1, kind="stable")[:, : self.used] // self.shares
        weight = np.take_along_axis(scores, expert, axis=1)
        if self.scoring == "softmax_selected":
            weight = _softmax(weight)
        elif self.scoring == "sparsemixer":
            weight = self._sparse_weights(np.asarray(logits, np.float64), expert)
        if self.normalised:
            weight = weight / np.maximum(weight.sum(axis=1, keepdims=True), LEAST_SUM)
        weight = weight * self.scale
        if expert_scale is not None:
            weight = weight * expert_scale[expert]
        return expert.astype(np.uint32), weight

    def _sparse_weights(self, logits: Array, expert: Array) -> Array:
        """The weights of the two chosen experts, (rows, 2)."""
        left, weights = logits.copy(), []
        for chosen in expert.T[:, :, None]:
            best = np.take_along_axis(left, chosen, axis=1)
            is_near = best - left <= self.near * np.maximum(np.abs(logits), best)
            sums = np.where(is_near, np.exp(left - best), 0.0).sum(axis=1, keepdims=True)
            weights.append(1.0 / sums)
            np.put_along_axis(left, chosen, -np.inf, axis=1)
        return np.concatenate(weights, axis=1)

    def _allowed(self, choice: Array) -> Array:
        """Whether an expert is of one of the best groups, (rows, experts)."""
        by_group = choice.reshape(len(choice), self.groups, -1)
        best_of = 1 if self.by_best else 2
        values = np.sort(by_group, axis=2)[:, :, -best_of:].sum(axis=2)
        best = np.argsort(-values, axis=1, kind="stable")[:, : self.groups_used]
        allowed = np.zeros_like(values, bool)
        np.put_along_axis(allowed, best, True, axis=1)
        return np.repeat(allowed, self.group_experts, axis=1)

    def random_logits(self, rows: int, rng: np.random.Generator) -> dict[str, Any]:
        """Inputs of a kernel by name: multiples of 1 / 8, so that ties occur, and no near
        ties."""
        inputs = {"logits": _eighths(rng, 3.0, (rows, self.experts))}
        if self.bias:
            inputs["choice_bias"] = _eighths(rng, 0.5, (self.experts,))
        if self.expert_scale:
            inputs["expert_scale"] = rng.uniform(0.5, 2.0, self.experts).astype(np.float32)
        return inputs


def _softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=1, keepdims=True))
    total: Array = e.sum(axis=1, keepdims=True)
    return e / total


def _eighths(rng: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> Array:
    return (np.round(8 * deviation * rng.standard_normal(shape)) / 8).astype(np.float32)
