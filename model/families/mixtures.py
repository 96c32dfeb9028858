"""Mixtures of experts read from a file: helpers for families.

Keys, under the architecture's name; each family lists those it reads:

    expert_count  expert_used_count             0 or absent: no mixture
    expert_group_count  expert_group_used_count           all families; 1 or less: no groups
    expert_feed_forward_length (for all layers or each)   expert_shared_feed_forward_length
    expert_shared_count  expert_gating_func  expert_weights_norm  expert_weights_scale
    leading_dense_block_count  swiglu_clamp_exp  swiglu_clamp_shexp

Meanings are those of llama.cpp (`src/llama-model.cpp`, `build_moe_ffn` of `src/llama-graph.cpp`):
a length or scale of 0 counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, LatentExperts, Mixture, Router
from urdir.model.families.layers import Network
from urdir.model.families.parts import SILU, dense
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.stored import Linear
from urdir.ptxgen.kernels.activation import Activation, Clamp
from urdir.ptxgen.kernels.experts.selection import Scoring

#: Tensors of a dense FFN, and of a mixture.
DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
EXPERTS = (
    "ffn_gate_inp.weight",
    "exp_probs_b.bias",
    *(f"ffn_{name}_{kind}.weight" for name in ("gate", "up", "down") for kind in ("exps", "shexp")),
)
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_selected"}


def has_experts(file: Reader) -> bool:
    """Whether the metadata mention experts."""
    return file.count("expert_count") > 0


def leading_dense(file: Reader) -> int:
    """Number of leading dense layers."""
    return file.count("leading_dense_block_count")


# ---- widths ----


def dense_width(file: Reader, layer: int) -> int:
    """The feed_forward_length of a layer."""
    return file.size_at("feed_forward_length", layer)


def expert_width(file: Reader, layer: int, default: int = 0) -> int:
    """The expert_feed_forward_length of a layer; ``default`` if 0 or absent."""
    if default and not file.by_layer("expert_feed_forward_length", int, 0)[layer]:
        return default
    return file.size_at("expert_feed_forward_length", layer)


def divided_width(file: Reader, layer: int) -> int:
    """As `expert_width`; by default feed_forward_length divided by the number of used experts."""
    if file.by_layer("expert_feed_forward_length", int, 0)[layer]:
        return expert_width(file, layer)
    return dense_width(file, layer) // used_experts(file, layer)


def shared_width(file: Reader, default: int) -> int:
    """The expert_shared_feed_forward_length, or ``default``."""
    return file.count("expert_shared_feed_forward_length") or default


def shared_count(file: Reader) -> int:
    """The expert_shared_count, which is required."""
    file.required("expert_shared_count", int)
    return file.count("expert_shared_count")


# ---- routers ----


def used_experts(file: Reader, layer: int) -> int:
    """Number of experts per token."""
    experts, used = file.size("expert_count"), file.by_layer("expert_used_count", int)
    if not 0 < used[layer] <= experts:
        raise ConfigError(
            f"metadata key '{file.key('expert_used_count')}' is {used[layer]} of {experts} experts"
        )
    if any(other != used[0] for other in used):
        raise UnsupportedError(f"{file.key('expert_used_count')} differs between layers")
    return used[layer]


def scoring(file: Reader, default: Scoring | None = None) -> Scoring:
    """The scoring named by expert_gating_func; ``default`` if 0 or absent."""
    number = file.count("expert_gating_func")
    if not number and default is not None:
        return default
    if not number:
        raise ConfigError(f"metadata key '{file.key('expert_gating_func')}' is missing")
    if number not in _SCORINGS:
        raise UnsupportedError(
            f"{file.key('expert_gating_func')} is {number}; supported are "
            "1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen)"
        )
    return _SCORINGS[number]


def weights_norm(file: Reader) -> bool:
    """expert_weights_norm: whether weights are divided by their sum."""
    return file.optional("expert_weights_norm", bool, False)


def weights_scale(file: Reader) -> float:
    """expert_weights_scale: a factor of the weights."""
    return file.optional("expert_weights_scale", float, 0.0) or 1.0


def router(
    file: Reader,
    layer: int,
    scores: Scoring = "softmax",
    *,
    normalize: bool = False,
    scale: float = 1.0,
    choice_bias: Presence = "absent",
    choice_name: str = "exp_probs_b.bias",
    bias: Presence = "absent",
) -> Router:
    """The router ffn_gate_inp (experts, hidden), with ``choice_name`` (experts,) as selection bias
    and the groups of the metadata. Raises ConfigError for inconsistent numbers."""
    experts = file.size("expert_count")
    groups, groups_used = _groups(file, experts)
    chooses = choice_bias == "required" or (
        choice_bias == "optional" and file.has(choice_name, layer)
    )
    return Router(
        _unordered(file.linear("ffn_gate_inp", layer, experts, file.hidden, bias=bias)),
        used_experts(file, layer),
        scores,
        file.vector(choice_name, layer, experts) if chooses else None,
        groups,
        groups_used,
        file.own("weights_norm", bool, normalize),
        scale,
        by_best=file.own("groups_by_best", bool, False),
    )


def _groups(file: Reader, experts: int) -> tuple[int, int]:
    groups, used = file.count("expert_group_count"), file.count("expert_group_used_count")
    if groups <= 1:
        return 1, 1
    if groups >= experts or experts % groups or not 0 < used < groups:
        raise ConfigError(
            f"{experts} experts in {groups} groups, {used} of them used "
            f"({file.key('expert_group_count')}, expert_group_used_count)"
        )
    return groups, used


# ---- networks ----


def mixture(
    file: Reader,
    layer: int,
    route: Router,
    width: int,
    activation: Activation = SILU,
    *,
    shared: Dense | None = None,
    shared_gate: Linear | None = None,
    gate: Presence = "required",
    bias: Presence = "absent",
    weigh_input: bool = False,
    latent: LatentExperts | None = None,
    suffix: str = "_exps",
) -> Mixture:
    """The experts ffn_gate_exps, ffn_up_exps and ffn_down_exps (experts, rows, cols), with biases
    (experts, rows); or those of another ``suffix``. Gate and up may be one tensor,
    ffn_gate_up_exps, the gates of an expert first."""
    experts, hidden = route.experts, file.hidden if latent is None else latent.down.rows
    first: Linear | None
    if file.has(f"ffn_gate_up{suffix}.weight", layer):
        shape = (experts, 2 * width, hidden)
        both = file.linear(f"ffn_gate_up{suffix}", layer, *shape, bias=bias)
        first, up = (both.part(at, width, 2 * width) for at in (0, width))
    else:
        has_gate = gate == "required" or file.anywhere(f"ffn_gate{suffix}.weight")
        shape = (experts, width, hidden)
        first = file.linear(f"ffn_gate{suffix}", layer, *shape, bias=bias) if has_gate else None
        up = file.linear(f"ffn_up{suffix}", layer, *shape, bias=bias)
    for of in (up, first):
        if of is not None and of.order is not None and of.cols % 32:
            raise UnsupportedError(
                f"tensor '{of.matrix.name}' has {of.cols} columns in orders of their own: "
                "supported are multiples of 32"
            )
    return Mixture(
        route,
        up,
        _unordered(file.linear(f"ffn_down{suffix}", layer, experts, hidden, width, bias=bias)),
        first,
        activation,
        weigh_input,
        shared,
        shared_gate,
        latent,
    )


def _unordered(of: Linear) -> Linear:
    """Raises UnsupportedError for columns in an order of their own: folders have none in routers,
    and none in last matrices of experts, as rows of the first ones are put in their order."""
    if of.order is not None:
        raise UnsupportedError(
            f"tensor '{of.matrix.name}' has columns in an order of its own ('{of.order.name}')"
        )
    return of


def limited(limit: float, clamp: Clamp) -> Activation:
    """SwiGLU with a limit; limits below 1e-6 mean none."""
    return Activation("silu", limit, clamp) if limit > 1e-6 else SILU


def plain_dense(file: Reader, layer: int, activation: Activation = SILU) -> Dense:
    """The dense FFN of a layer, without biases, in families with experts."""
    return dense(file, layer, activation, width=dense_width(file, layer), bias="absent")


def shared_expert(
    file: Reader, layer: int, width: int, activation: Activation = SILU
) -> Dense | None:
    """The FFN ffn_*_shexp for all tokens; None if its width is 0."""
    if not width:
        return None
    return dense(file, layer, activation, width=width, suffix="_shexp", bias="absent")


def unless_dense(
    file: Reader, experts: Callable[[int], Mixture]
) -> Callable[[int], Dense | Mixture]:
    """``experts`` of a layer; a dense FFN in the leading dense layers."""
    leading = leading_dense(file)
    return lambda layer: plain_dense(file, layer) if layer < leading else experts(layer)


def optional_mixture(file: Reader, layer: int, shared: int = 0) -> Dense | Mixture:
    """The FFN of Llama and its closest relatives: dense, or experts as in Mixtral (arXiv
    2401.04088): softmax, weights that sum to 1, and a shared expert of width ``shared``."""
    if not has_experts(file):
        return dense(file, layer)
    route = router(file, layer, normalize=True)
    width, beside = dense_width(file, layer), shared_expert(file, layer, shared)
    return mixture(file, layer, route, width, shared=beside, gate="optional")


# ---- whole models ----


def without(
    description: Description, file: Reader, kind: type[Network], names: Iterable[str]
) -> Description:
    """The description with tensors of these names unused in layers with an FFN of that ``kind``:
    llama.cpp loads and ignores them."""
    layers = (*description.layers, *(head.layer for head in description.nextn))
    unused = [
        f"blk.{index}.{name}"
        for index, layer in enumerate(layers)
        if any(isinstance(network, kind) for network in layer.networks)
        for name in names
    ]
    stored = tuple(name for name in unused if name in file.stored)
    return replace(description, unused_tensors=description.unused_tensors + stored)
