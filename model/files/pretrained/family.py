"""A family's table: which fields of config.json and which stored tensors are what it reads.

Families read sizes and settings by key ("attention.head_count") and weights by tensor name
("blk.0.attn_q.weight"), see `families.reader`. GGUF files store them under these names. A folder
has the names of transformers' classes: a `Family` maps them, one for each ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.layouts import Layout
from urdir.ptxgen.kernels.rotation import RopeStyle

Found = dict[str, Value]
#: What is not a rename: it takes fields and adds keys.
Step = Callable[[Fields, Found], None]


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type``. Fields and tensors outside its table and the common ones are refused.

    ``windows`` says how a layer's sliding window reaches the description: a window for each layer,
    flags for the family's own pattern, or not at all: they are refused.
    """

    architecture: str  # the family's name in `families`
    #: Modules of a layer and the tensors they are, before those of `names.LAYER`; several: parts;
    #: (): none, without effect.
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    #: Fields and their keys, before those of `KEYS`; "" is a field without effect.
    keys: Mapping[str, str] = field(default_factory=dict)
    #: Keys that the class implies.
    implied: Mapping[str, Value] = field(default_factory=dict)
    #: Values of fields that config.json may leave out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Fields, with the only supported values.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    steps: tuple[Step, ...] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    #: Modules outside of layers, before those of `names.ENDS`.
    ends: Mapping[str, str] = field(default_factory=dict)
    #: Modules with a list of layers each, as long as the others; the layers are numbered on.
    stacks: tuple[str, ...] = ()
    #: Prefixes of stored names, removed in this order, and those of tensors without effect.
    outer: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    other_experts: bool = False  # those of other modalities follow `expert_count` of text
    rope: RopeStyle | None = "half"  # None: no RoPE
    windows: Literal["each", "pattern", "none"] = "each"
    without_experts: Family | None = None  # if num_local_experts is 0 or absent
    ranking: Family | None = None  # of a class for sequence classification
    bidirectional: Family | None = None  # if use_bidirectional_attention is true
    encoding: Family | None = None  # of a class for the encoder alone
    #: The tensor that a stored one is, in place of the tables above; "" if it is none.
    place: Callable[[str], str] | None = None
    tied: bool = False  # unless the configuration says otherwise
    activations: tuple[str, ...] = ("silu", "swish")


#: Sizes and settings of all families, by the fields of their classes.
KEYS: Mapping[str, str] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), "block_count"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), "context_length"),
    **dict.fromkeys(("seq_length", "max_seq_len", "model_max_length"), "context_length"),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model"), "embedding_length"),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), "feed_forward_length"),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), "attention.head_count"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), "attention.head_count_kv"),
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(
        ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), "attention.layer_norm_epsilon"
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "expert_count"
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k"),
        "expert_used_count",
    ),
    "moe_topk": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        "expert_shared_feed_forward_length",
    ),
    **dict.fromkeys(("n_group", "num_expert_group"), "expert_group_count"),
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
}
#: Fields that others read: the family, tokens, the types of weights.
READ_ELSEWHERE = frozenset(
    {
        "architectures", "model_type", "vocab_size", "bos_token_id", "eos_token_id",
        "quantization_config", "compression_config",
    }
)  # fmt: skip
#: Fields without effect on answers.
IGNORED = frozenset(
    {
        "auto_map", "dtype", "torch_dtype",
        "transformers_version", "use_cache", "initializer_range", "attention_dropout",
        "hidden_dropout", "residual_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop",
        "emb_pdrop", "attn_pdrop", "classifier_dropout", "dropout", "activation_dropout",
        "layerdrop",
        "pad_token_id", "sep_token_id", "unk_token_id",
        "eod_token_id", "cache_implementation", "output_attentions", "output_hidden_states",
        "return_dict", "id2label", "label2id", "problem_type", "torchscript", "use_bfloat16",
        "task_specific_params", "finetuning_task", "name_or_path", "chunk_size_feed_forward",
        "tokenizer_class", "prefix", "tie_word_embeddings", "pretraining_tp",
        "gradient_checkpointing", "attention_bias", "mlp_bias", "use_bias", "add_bias_linear",
        "bias", "qkv_bias",
        "attention_out_bias", "use_qkv_bias", "lm_head_bias", "no_bias", "projectors_bias",
        "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha",
        "input_jitter_noise", "seq_aux", "ep_size", "num_nextn_predict_layers",
        "mtp_num_hidden_layers", "num_logits_to_keep", "use_mamba_kernels", "init_std",
        "vision_config", "audio_config", "is_decoder", "moe_aux_loss_coeff", "init_method",
        "initial_context_length",
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme",
        "time_step_max", "time_step_min", "time_step_scale", "mamba_chunk_size", "chunk_size",
        "use_long_context", "for_llm_compressor", "moe_router_dtype", "mamba_ssm_dtype",
        "use_associative_scan", "use_mambapy", "use_falcon_mambapy", "mamba_ssm_cache_dtype",
    }
)  # fmt: skip
#: Those of the outer object alone, which transformers wrote into every configuration: settings of
#: generation (generation_config.json has those that count), of training and of classes. In an
#: object within, "top_k" may be of a router.
IGNORED_OUTSIDE = frozenset(
    {
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
        "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
        "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "tf_legacy_loss",
        "cross_attention_hidden_size", "output_past", "num_labels", "max_sequence_length",
        "attn_implementation", "keys_to_ignore_at_inference", "neftune_noise_alpha",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "is_llama_config",
        "transformers.js_config", "perceiver_config", "pixel_shuffle_factor", "use_resampler",
    }
)  # fmt: skip
IGNORED_PREFIXES = ("_", "unsloth_", "summary_")
#: Fields of all families, with the only supported values.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "moe_layer_freq": (1,),
    "rope_interleaved": (False,),
    "qk_layer_norms": (False,),
}
