"""Hunyuan 4: gated MLA with sinks over the tokens that an indexer selects, several independent
streams of the residual, and DeepSeek V3's experts with limits.

Keys: those of `parts`, `rope`, `latent`, `mixtures` and `hyper` (with hyper_connection.magnitude);
attention.q_lora_rank, attention.indexer.head_count, key_length, top_k (0: all tokens) and types
(see `deepseek32`), rope.dimension_count, expert_shared_count, swiglu_clamp_exp. Of indexers the
last values of a head rotate. llama.cpp: `src/models/` hy-v4.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.families.architectures.deepseek32 import INDEXER, indexer, own_indexers
from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.hyper import stream_join, with_streams
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.mixtures import limited, scoring, unless_dense
from urdir.model.families.parts import SILU, output_gate, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.norm import Norm


def hy_v4(file: Reader) -> Description:
    """Hunyuan 4."""
    key_dim, value_dim = latent_head_dims(file)
    rope = read_rope(file, "interleaved", key_dim, factors=False)
    heads, rank = file.size("attention.head_count"), file.size("attention.q_lora_rank")
    layers, norm = range(file.layer_count()), Norm("layer", rms_norm(file).eps)
    selects = file.count("attention.indexer.top_k") > 0
    own = own_indexers(file, [False] * len(layers), layers) if selects else []
    limits = file.by_layer("swiglu_clamp_exp", float, 0.0)
    scores = scoring(file)

    def attends(index: int) -> Attention:
        chosen = None
        if selects and own[index]:
            chosen = indexer(file, index, rope, rank, norm=norm, rotates_last=True)
        return latent_attention(
            *(file, index, heads, rope.dim, rank),
            rope=rope,
            sinks=file.vector("attn_sinks.weight", index, heads),
            gate=output_gate(file, index, heads * value_dim, "sigmoid"),
            indexer=chosen,
            follows_indexer=selects and chosen is None,
        )

    def experts(index: int) -> Mixture:
        limit = limited(limits[index], "inputs")
        return scored_experts(file, index, None, limit, SILU, scores=scores, choice_bias="optional")

    network = unless_dense(file, experts)
    description = rms_decoder(file, attends, network, output="required", unused=INDEXER)
    streams = (with_streams(file, *at, mixed=False) for at in enumerate(description.layers))
    return replace(
        description,
        layers=tuple(streams),
        join=stream_join(file),
        ignored_keys=file.ignored_keys,
    )


ARCHITECTURES = {"hy_v4": hy_v4}
