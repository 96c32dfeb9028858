"""Mixtures of experts with sliding windows in most layers: Trinity, Laguna, K-EXAONE and others.

Arcee's Trinity (afmoe), Poolside's Laguna, K-EXAONE, JetBrains' Mellum 2, Maple, SmallThinker and
Flint.
llama.cpp: `src/models/` afmoe.cpp, laguna.cpp, exaone-moe.cpp, mellum.cpp, maple.cpp,
smallthinker.cpp.

Keys: those of `parts`, `rope`, `windows` and `mixtures`: expert_feed_forward_length and, in the
families that read them, expert_shared_count, expert_shared_feed_forward_length,
leading_dense_block_count, expert_gating_func (default 2), expert_weights_norm,
expert_weights_scale, swiglu_clamp_exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.mixtures import (
    divided_width,
    expert_width,
    limited,
    mixture,
    router,
    scoring,
    shared_count,
    shared_expert,
    shared_width,
    unless_dense,
)
from urdir.model.families.parts import (
    RELU,
    attention,
    head_dims,
    heads,
    output_gate,
    required_head_norms,
    rms_norm,
)
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.rope import unscaled_rope, windowed_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.model.families.windows import (
    flagged_layers,
    optional_window,
    optional_windows,
    windowed_layers,
)
from urdir.ptxgen.kernels.experts.selection import Scoring
from urdir.ptxgen.kernels.rotation import RopeScaling


def afmoe(file: Reader) -> Description:
    """Trinity (arXiv 2602.17004): norms before and after, elementwise attention gates; every fourth
    layer has no RoPE. A file without a window size has no windowed layer."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    window, full = optional_window(file), shared_rope(file, "half")
    windowed = optional_windows(file, window, 4)
    local = windowed_rope(file, full, key_dim, scaled=True)

    def attends(index: int) -> Attention:
        width = heads(file, index)[0] * key_dim
        rope = local if windowed[index] else full
        return attention(
            file,
            index,
            rope if (index + 1) % 4 else None,
            qk_norm=required_head_norms(file, index, norm, key_dim),
            window=window if windowed[index] else 0,
            gate=output_gate(file, index, width, "sigmoid"),
            output_bias="absent",
        )

    count = shared_count(file)
    network = _chosen_with_bias(file, lambda index: count * expert_width(file, index), "required")
    return rms_decoder(
        file,
        attends,
        unless_dense(file, network),
        post_norms=("post_attention_norm", "post_ffw_norm"),
        embedding_scale=math.sqrt(file.hidden),
    )


def laguna(file: Reader) -> Description:
    """Laguna: attention gates per head or per element, by the shape of the tensor; only
    full-attention layers extend the RoPE context."""
    key_dim, window, full = head_dims(file)[0], optional_window(file), shared_rope(file, "half")
    windowed = optional_windows(file, window, 4, full_first=True)
    local = windowed_rope(file, full, key_dim, scaled=False)
    local = replace(local, scaling=RopeScaling.none())

    def gate(index: int) -> dict[str, Any]:
        queries = heads(file, index)[0]
        by_value = file.stored.get(f"blk.{index}.attn_gate.weight", (0,))[0] == queries * key_dim
        rows = queries * key_dim if by_value else queries
        return {"gate": output_gate(file, index, rows, "softplus")}

    attends = windowed_mixer(file, windowed, window, local, full, head_norm=True, more=gate)
    count = file.count("expert_shared_count", 1)

    def shared(index: int) -> int:
        return shared_width(file, count * expert_width(file, index))

    return rms_decoder(
        file, attends, unless_dense(file, _chosen_with_bias(file, shared, "required"))
    )


def exaone_moe(file: Reader) -> Description:
    """K-EXAONE (arXiv 2601.01739): only windowed layers have RoPE."""
    file.count("expert_shared_count")  # there is one, whatever this says
    windowed, rope = windowed_layers(file, 4), shared_rope(file, "half", factors=True)
    attends = windowed_mixer(file, windowed, _window(file), rope, None, head_norm=True)
    scores = scoring(file)

    def shared(index: int) -> int:
        return shared_width(file, expert_width(file, index))

    network = _chosen_with_bias(file, shared, "optional", scores)
    return rms_decoder(file, attends, unless_dense(file, network), output="required")


def mellum(file: Reader) -> Description:
    """Mellum 2: windowed layers use RoPE without context extension; one base for all layers."""
    window, full = optional_window(file), shared_rope(file, "half")
    windowed = optional_windows(file, window, 4)
    local = unscaled_rope(file, full, head_dims(file)[0])
    attends = windowed_mixer(file, windowed, window, local, full, head_norm=True)

    def network(index: int) -> Mixture:
        return mixture(file, index, router(file, index, normalize=True), divided_width(file, index))

    return rms_decoder(file, attends, network, output="required")


def maple(file: Reader) -> Description:
    """Maple: only windowed layers have RoPE; experts clamp the gate and up products."""
    rope = windowed_rope(file, shared_rope(file, "half"), head_dims(file)[0], scaled=True)
    windowed, window = flagged_layers(file), _window(file)
    attends = windowed_mixer(file, windowed, window, rope, None, head_norm=True)
    limits = file.by_layer("swiglu_clamp_exp", float)

    def network(index: int) -> Mixture:
        route = router(file, index, normalize=True)
        width = expert_width(file, index)
        return mixture(file, index, route, width, limited(limits[index], "inputs"))

    return rms_decoder(file, attends, network, output="required")


def smallthinker(file: Reader) -> Description:
    """SmallThinker (arXiv 2507.20984): the router reads the layer's input, before attention; ReGLU.
    Windows have 4096 tokens, and every fourth layer has no RoPE (except in models of four layers,
    as in llama.cpp)."""
    layers, full = file.layer_count(), shared_rope(file, "half")
    window = 4096 if optional_window(file) else 0
    windowed = optional_windows(file, window, 4, full_first=True)
    local = windowed_rope(file, full, head_dims(file)[0], scaled=True)
    scores = scoring(file)

    def attends(index: int) -> Attention:
        rotates = not window or layers == 4 or index % 4
        rope = local if windowed[index] else full
        return attention(
            file,
            index,
            rope if rotates else None,
            window=window if windowed[index] else 0,
            output_bias="absent",
        )

    def network(index: int) -> Mixture:
        route = replace(router(file, index, scores, normalize=True), reads="layer")
        return mixture(file, index, route, expert_width(file, index), RELU)

    return rms_decoder(file, attends, network)


def flint(file: Reader) -> Description:
    """Flint (RecursiveSI): sinks; only windowed layers have RoPE. Folders only."""
    window, rope = optional_window(file), shared_rope(file, "half")
    windowed = optional_windows(file, window, 4)

    def sinks(index: int) -> dict[str, Any]:
        return {"sinks": file.vector("attn_sinks.weight", index, heads(file, index)[0])}

    attends = windowed_mixer(file, windowed, window, rope, None, head_norm=True, more=sinks)

    def network(index: int) -> Mixture:
        route, width = router(file, index, "sigmoid", normalize=True), expert_width(file, index)
        beside = shared_expert(file, index, shared_width(file, width))
        return mixture(file, index, route, width, shared=beside)

    return rms_decoder(file, attends, unless_dense(file, network))


# ---- shared by several families ----


def _window(file: Reader) -> int:
    """The window size of windowed layers."""
    return file.size("attention.sliding_window")


def _chosen_with_bias(
    file: Reader,
    shared: Callable[[int], int],
    bias: Presence,
    scores: Scoring | None = None,
) -> Callable[[int], Mixture]:
    """Experts chosen by biased scores (default sigmoid), and a shared one of width ``shared``."""
    scores = scores or scoring(file, "sigmoid")
    return lambda index: scored_experts(file, index, shared(index), scores=scores, choice_bias=bias)


ARCHITECTURES = {
    "afmoe": afmoe,
    "laguna": laguna,
    "exaone-moe": exaone_moe,
    "mellum": mellum,
    "maple": maple,
    "smallthinker": smallthinker,
    "flint": flint,
}
