"""Qwen 4: delta rules and attention to pools of tokens, four streams, a memory of n-grams."""

from __future__ import annotations

from collections.abc import Mapping

from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.layouts import Layout, plus_one
from urdir.model.files.pretrained.steps.qwen4 import (
    index_keys,
    index_queries,
    ngram_table,
    ngram_taps,
    qwen4_layers,
    streams,
)
from urdir.model.files.pretrained.steps.recurrent import delta_layers
from urdir.model.files.pretrained.tables.recurrent import DELTA

_HYPER = {
    **{"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"},
    "block_inject_weight": "inject",
}
_STREAM_NORMS = (
    *("hc_attn_norm", "hc_ffn_norm", "output_hc_norm"),
    *("ple_norm_key", "ple_norm_query", "ple_norm_conv"),
)
_QWEN4 = Family(
    "qwen4exp",
    names={
        **{f"{of}_hyper_connection.{stored}": f"hc_{to}_{name}"
           for of, to in (("attn", "attn"), ("mlp", "ffn")) for stored, name in _HYPER.items()},
        **{f"ple.{of}_proj": f"ple_{of}" for of in ("key", "value")},
        **{f"ple.norm_{of}": f"ple_norm_{of}" for of in ("key", "query", "conv")},
        "ple.conv1d": "ple_conv1d",
        "ple.ple_embedding.ngram_embedding": "ple_table",
        "ple.ple_embedding.ngram_embedding.shard_{}.weight": "ple_table.weight",
        # they follow from the configuration
        **dict.fromkeys((f"ple.ple_embedding.{of}" for of in (
            "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")), ()),
        "self_attn.indexer.index_qk_proj": ("indexer.q_proj.weight", "indexer.k_proj.weight"),
        **{f"self_attn.indexer.{of}_layernorm": f"indexer.{of}_norm.weight" for of in "qk"},
    },
    ends={f"hyper_connection_mixer.{stored}": f"output_hc_{name}"
          for stored, name in _HYPER.items() if name != "inject"},
    keys={
        **{"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank"},
        "indexer_n_heads": "attention.indexer.head_count",
        "indexer_head_dim": "attention.indexer.key_length",
        "indexer_budget": "attention.indexer.top_k",
    },
    defaults={
        **{"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_experts": 512},
        **{"num_experts_per_tok": 10, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"hc_count": 4, "hc_lowrank": 320},
    },
    fixed={"norm_topk_prob": (True,)},
    ignored=frozenset({"number_of_conv_states"}),
    steps=(qwen4_layers, delta_layers, ngram_table),
    layouts={
        **DELTA,
        **{f"{name}.weight": Layout(values=plus_one, shape=streams) for name in _STREAM_NORMS},
        **{f"indexer.{of}_norm.weight": Layout(values=plus_one) for of in "qk"},
        "indexer.q_proj.weight": Layout(rows=index_queries),
        "indexer.k_proj.weight": Layout(rows=index_keys),
        "ple_conv1d.weight": Layout(shape=ngram_taps),
        "ple_table.weight": Layout(joined=True),
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QWEN4)
