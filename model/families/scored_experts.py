"""Experts as in DeepSeek V3 (arXiv 2412.19437): chosen by biased scores, weighted by unbiased ones.

The bias of each expert balances load. Keys: expert_feed_forward_length, expert_gating_func,
expert_weights_norm, expert_weights_scale, and those of groups, as in `mixtures`.
"""

from __future__ import annotations

from urdir.model.families.feed_forward import LatentExperts, Mixture
from urdir.model.families.mixtures import (
    expert_width,
    mixture,
    router,
    scoring,
    shared_count,
    shared_expert,
    weights_norm,
    weights_scale,
)
from urdir.model.families.parts import SILU
from urdir.model.families.reader import Presence, Reader
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.selection import Scoring


def scored_experts(
    file: Reader,
    layer: int,
    beside: int | None = None,
    activation: Activation = SILU,
    shared_activation: Activation | None = None,
    *,
    scores: Scoring | None = None,
    normalize: bool | None = None,
    choice_bias: Presence = "required",
    latent: LatentExperts | None = None,
) -> Mixture:
    """The experts of a layer, and in parallel an FFN for all tokens of width ``beside`` (0: none;
    default: expert_shared_count experts), with the same activation or its own. ``scores`` and
    ``normalize`` replace expert_gating_func and expert_weights_norm."""
    route = router(
        file,
        layer,
        scores or scoring(file),
        normalize=weights_norm(file) if normalize is None else normalize,
        scale=weights_scale(file),
        choice_bias=choice_bias,
    )
    width = expert_width(file, layer)
    beside = shared_count(file) * width if beside is None else beside
    shared = shared_expert(file, layer, beside, shared_activation or activation)
    return mixture(file, layer, route, width, activation, shared=shared, latent=latent)
