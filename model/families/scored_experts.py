"""Experts as DeepSeek V3 has them (arXiv 2412.19437): the highest scores choose, after a bias for
each expert that balances their load; the scores without it are the weights.

Keys: expert_feed_forward_length, expert_gating_func, expert_weights_norm, expert_weights_scale, and
those of groups, as in `mixtures`.
"""

from __future__ import annotations

from urdir.model.families.feed_forward import LatentExperts, Mixture
from urdir.model.families.mixtures import (
    Scoring,
    expert_width,
    mixture,
    router,
    scoring,
    shared_expert,
    weights_norm,
    weights_scale,
)
from urdir.model.families.parts import SILU
from urdir.model.families.reader import Presence, Reader
from urdir.ptxgen.kernels.activation import Activation


def scored_experts(
    file: Reader,
    layer: int,
    beside: int,
    activation: Activation = SILU,
    shared_activation: Activation | None = None,
    *,
    scores: Scoring | None = None,
    normalize: bool | None = None,
    choice_bias: Presence = "required",
    latent: LatentExperts | None = None,
) -> Mixture:
    """The experts of a layer, and ``beside`` them a network of all tokens, so wide (0: none), with
    the same activation or one of its own. ``scores`` and ``normalize`` are in place of
    expert_gating_func and expert_weights_norm."""
    route = router(
        file,
        layer,
        scores or scoring(file),
        normalize=weights_norm(file) if normalize is None else normalize,
        scale=weights_scale(file),
        choice_bias=choice_bias,
    )
    shared = shared_expert(file, layer, beside, shared_activation or activation)
    width = expert_width(file, layer)
    return mixture(file, layer, route, width, activation, shared=shared, latent=latent)
