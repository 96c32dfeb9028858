"""GLM 5.3 Flash (glm5-next): Kimi Delta Attention, and MLA without rotation over the tokens that an
indexer selects in pools; hyper-connections, and DeepSeek V3's experts.

Keys: those of `parts`, `latent`, `kimi_delta`, `mixtures` and `hyper`; attention.q_lora_rank,
attention.indexer.head_count, key_length, top_k, types, kpool (tokens of a pool),
kpool_select_tail (false is refused), attention.layer_norm_epsilon (of index keys),
kda.gate_lower_bound, rope.dimension_count (others than 0 are refused), swiglu_clamp_exp and
swiglu_clamp_shexp (refused; a folder has one limit of all FFNs). llama.cpp: `src/models/`
glm5-next.cpp; it has no graph for MTP.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.errors import UnsupportedError
from urdir.model.families.architectures.deepseek32 import INDEXER, indexer, own_indexers
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.hyper import with_streams
from urdir.model.families.kimi_delta import heads_of_all, kimi_decoder, kimi_delta, low_rank
from urdir.model.families.latent import latent_attention
from urdir.model.families.mixtures import leading_dense, limited, plain_dense, scoring
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import KimiDelta
from urdir.model.families.scored_experts import scored_experts

#: Of the L2 norm of the delta rule's queries and keys.
_L2_EPS = 1e-6


def glm5_next(file: Reader) -> Description:
    """GLM 5.3 Flash."""
    heads, floor = heads_of_all(file), file.optional("kda.gate_lower_bound", float, 0.0)
    if floor > 0.0:
        raise UnsupportedError(f"{file.key('kda.gate_lower_bound')} is {floor}, not below 0")
    if file.optional("rope.dimension_count", int, 0):
        raise UnsupportedError(f"{file.key('rope.dimension_count')}: keys that rotate")
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if any(file.by_layer(key, float, 0.0)):
            raise UnsupportedError(f"{file.key(key)}: limits of experts")
    layers, kv_heads = file.layer_count(), file.by_layer("attention.head_count_kv", int)
    attending = (layer for layer in range(layers) if kv_heads[layer])
    limit = limited(file.own("swiglu_limit", float, 0.0), "inputs")
    own, scores = own_indexers(file, [True] * layers, attending), scoring(file, "sigmoid")

    def attends(index: int) -> Attention:
        rank = file.size("attention.q_lora_rank")
        return latent_attention(
            *(file, index, heads, 0, rank),
            indexer=indexer(file, index, None, rank, pools=True) if own[index] else None,
            follows_indexer=not own[index],
        )

    def delta(index: int) -> KimiDelta:
        decay, gate = (low_rank(file, index, name, heads) for name in ("ssm_f", "ssm_g"))
        mixer = kimi_delta(file, index, heads, decay, gate, floor, negated=True)
        return replace(mixer, eps=_L2_EPS)

    def network(index: int) -> Dense | Mixture:
        if index < leading_dense(file):
            return plain_dense(file, index, limit)
        return scored_experts(file, index, None, limit, scores=scores)

    description = kimi_decoder(file, attends, delta, network)
    return replace(
        description,
        layers=tuple(with_streams(file, *at) for at in enumerate(description.layers)),
        unused_tensors=(*description.unused_tensors, *file.of_kinds(INDEXER)),
        ignored_keys=file.ignored_keys,
    )


ARCHITECTURES = {"glm5-next": glm5_next}
