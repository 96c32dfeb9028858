"""Cohere's mixture of experts (Command A+): parallel attention and FFN on one norm.

    x += O attention(Q x', K x', V x') + (experts(x') + shared(x')) / 2      x' = norm(x)

Three of four layers use a sliding window. Only these and the leading dense layers use RoPE, and MTP
heads, which have no window. The norm is RMSNorm if its epsilon is stored and not 0, else LayerNorm
without biases. Keys: those of `parts`, `rope`, `windows` and `mixtures`: leading_dense_block_count,
expert_feed_forward_length (default: feed_forward_length), expert_shared_count,
expert_shared_feed_forward_length, expert_gating_func (default 2), expert_weights_norm,
expert_weights_scale; attention.layer_norm_epsilon or attention.layer_norm_rms_epsilon; logit_scale
(0 means 1). llama.cpp: `src/models/cohere2moe.cpp`.
"""

from __future__ import annotations

from urdir.model.families.attention import Attention
from urdir.model.families.dense import shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.mixtures import (
    dense_width,
    expert_width,
    leading_dense,
    mixture,
    plain_dense,
    router,
    scoring,
    shared_expert,
    shared_width,
    weights_norm,
    weights_scale,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import attention, layer_norm, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.windows import windowed_layers


def cohere2moe(file: Reader) -> Description:
    """Command A+."""
    is_rms = file.optional("attention.layer_norm_rms_epsilon", float, 0.0) != 0.0
    norm = rms_norm(file) if is_rms else layer_norm(file)
    window = file.size("attention.sliding_window")
    windowed = windowed_layers(file, 4, full_first=True)
    rope, leading = shared_rope(file, "interleaved"), leading_dense(file)
    scores, normalize, scale = scoring(file, "sigmoid"), weights_norm(file), weights_scale(file)
    count = file.count("expert_shared_count")

    def attends(index: int) -> Attention:
        is_head = index in file.nextn_layers
        rotates = windowed[index] or index < leading or is_head
        return attention(
            file,
            index,
            rope if rotates else None,
            window=window if windowed[index] and not is_head else 0,
            output_bias="absent",
        )

    def network(index: int) -> Dense | Mixture:
        if index < leading:
            return plain_dense(file, index)
        width = expert_width(file, index, dense_width(file, index))
        shared = shared_width(file, width * count) if count else 0
        route = router(file, index, scores, normalize=normalize, scale=scale)
        return mixture(file, index, route, width, shared=shared_expert(file, index, shared))

    def layer(index: int) -> LayerConfig:
        second = network(index)
        has_shared = isinstance(second, Mixture) and second.shared is not None
        before = file.norm("attn_norm", index, norm)
        return LayerConfig(
            (
                Block((Branch(attends(index), before),)),
                Block(
                    (Branch(second, before, reads_layer_input=True),),
                    scale=0.5 if has_shared else 1.0,
                ),
            )
        )

    logit_scale = file.required("logit_scale", float) or 1.0
    return model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        logit_scale=logit_scale,
        nextn=NextnKind(norm, passes_normed=True),
    )


ARCHITECTURES = {"cohere2moe": cohere2moe}
