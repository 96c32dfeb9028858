"""Limits on the sizes that a file may claim.

A description is made of these numbers before any tensor is compared with them. Other integers only
count tokens or select a variant; they allocate nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files import limits
from urdir.model.files.limits import Limit

#: Heads whose dimensions have their own keys: windowed layers, latent attention.
_HEADS = ("", "_swa", "_mla", "_mla_swa")
_BY_LIMIT: Mapping[Limit, tuple[str, ...]] = {
    limits.LAYERS: (
        *("block_count", "decoder_block_count", "nextn_predict_layers"),
        "hash_layer_count",
    ),
    limits.HEADS: (
        *("attention.head_count", "attention.head_count_kv"),
        *("attention.indexer.head_count", "attention.output_group_count", "ple.heads_per_ngram"),
    ),
    limits.HEAD_WIDTH: (
        *(f"attention.{of}_length{kind}" for of in ("key", "value") for kind in _HEADS),
        *("rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections"),
        "attention.indexer.key_length",
        "wkv.head_size",
        *("kda.head_dim", "ssm.state_size", "ssm.conv_kernel", "shortconv.l_cache"),
        *("ple.conv_kernel", "ple.ngram_size"),
    ),
    limits.WIDTH: (
        *("embedding_length", "embedding_length_per_layer_input", "feed_forward_length"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
        "expert_chunk_feed_forward_length",
        *("expert_latent_length", "moe_latent_size", "ssm.inner_size", "ssm.time_step_rank"),
        "target_hidden_size",
        *(f"attention.{of}_lora_rank" for of in ("q", "kv", "decay", "iclr", "gate", "output")),
        *("attention.value_residual_mix_lora_rank", "attention.kv_lora_rank_swa"),
        *("time_mix_extra_dim", "time_decay_extra_dim", "adapters.lora_rank"),
        "hyper_connection.low_rank",
    ),
    limits.DRAFT_BLOCK: ("block_size",),
    limits.INDEX_POOL: ("attention.indexer.kpool",),
    limits.RESIDUAL_STREAMS: ("hyper_connection.count",),
    limits.SWITCHED: ("adapters.count",),
    limits.BALANCES: ("hyper_connection.sinkhorn_iterations",),
    limits.EXPERTS: (
        *("expert_count", "expert_used_count", "expert_shared_count"),
        *("expert_group_count", "expert_group_used_count", "ssm.group_count"),
        "experts_per_group",
    ),
}
#: Limits by key, without the architecture's name.
SIZES: Mapping[str, Limit] = {name: limit for limit, names in _BY_LIMIT.items() for name in names}
