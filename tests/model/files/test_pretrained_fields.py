"""Fields of config.json: what keys they become, what families add, and what is refused."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.plain_folder import CONFIG, GPT2, LLAMA3_SCALING, keys_of
from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files.pretrained.config import read_config, text_config
from urdir.model.files.pretrained.family import Family
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.layouts import tokens_or_first
from urdir.model.files.pretrained.places import find_places
from urdir.model.files.pretrained.tables import FAMILIES
from urdir.model.files.pretrained.tables.text_defaults import TEXT_DEFAULTS

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
LATENT = {
    "model_type": "deepseek_v3", "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "kv_lora_rank": 4,
}  # fmt: skip


def test_a_llama_configuration() -> None:
    assert keys_of() == {
        "block_count": 1, "embedding_length": 8, "feed_forward_length": 16,
        "attention.head_count": 2, "attention.head_count_kv": 1, "context_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "rope.dimension_count": 4, "own.rope_style": "half",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model_type": "mistral", "sliding_window": 16, "head_dim": 6},
            {"context_length": 32, "own.windows": [16], "attention.key_length": 6,
             "attention.value_length": 6, "rope.dimension_count": 6},
        ),
        ({"model_type": "mistral", "sliding_window": None}, {"context_length": 32}),
        ({"model_type": "mistral", "sliding_window_size": 16}, {"own.windows": [16]}),
        (
            {"model_type": "ministral", "sliding_window": 7, "num_hidden_layers": 2,
             "layer_types": ["full_attention", "sliding_attention"]},
            {"own.windows": [0, 7]},
        ),
        (
            {"model_type": "muse_glimmer_text", "num_hidden_layers": 6, "head_dim": 4},
            {"attention.sliding_window": 2048, "logit_scale": 0.19611613513818404,
             "attention.sliding_window_pattern": [True, False, True, True, True, False],
             "blk.5.attn_q_norm.weight": [float(np.float32(3.87))] * 4,
             "blk.5.attn_k_norm.weight": [1.0] * 4},
        ),
        (
            {"model_type": "muse_glimmer_text", "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope.freq_base": 10000.0, "rope_freqs_swa.weight": [4.0] * 64,
             "rope_freqs.weight": None},
        ),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "vocab_size": 5,
             "activation_sparsity_pattern": [0.95], "hidden_act": "absent"},
            {"rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "own.tokens": 5,
             "attention.sliding_window": 512},
        ),
        (
            {"model_type": "chameleon", "swin_norm": True, "vq_config": {"embed_dim": 8},
             "vocabulary_map": {f"IMGIMG{n}": n for n in range(8195, 3, -1)}},
            {"swin_norm": True, "attention.layer_norm_rms_epsilon": 1e-5},
        ),
        (
            {"model_type": "minimax_m3_vl_text", "mlp_layer_types": ["sparse"],
             "shared_intermediate_size": 32},
            {"attention.indexer.top_k": 1, "attention.indexer.block_size": 128,
             "expert_shared_count": 2, "leading_dense_block_count": 0},
        ),
        *(
            ({"model_type": of, "sliding_window": 16, "use_sliding_window": used},
             {"own.windows": [16] if used is True else None})
            for of in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl_text")
            for used in (True, "absent", None)
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            {"expert_count": 8, "expert_used_count": 2},
        ),
        (
            {"model_type": "granite", "attention_multiplier": 0.1, "embedding_multiplier": 12.0,
             "residual_multiplier": 0.2, "logits_scaling": 8},
            {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.2,
             "logit_scale": 8},
        ),
        (
            {"model_type": "cohere", "rms_norm_eps": "absent", "layer_norm_eps": 1e-5,
             "logit_scale": 0.0625},
            {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625},
        ),
        (
            {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 16,
             "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 4,
             "num_hidden_layers": 2, "query_pre_attn_scalar": 16,
             "layer_types": ["full_attention", "sliding_attention"]},
            {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0,
             "final_logit_softcapping": 30.0, "own.score_scale": 0.25,
             "attention.sliding_window_pattern": [False, True]},
        ),
        (
            {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e6,
             "head_dim": 4,
             "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8}},
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope_freqs.weight": [8, 8]},
        ),
        (
            {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "rope_theta": "absent",
             "head_dim": 4,
             "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                                 "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear",
                                                       "factor": 4}}},
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "own.local_rope": True,
             "rope_freqs_swa.weight": [4, 4]},
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 20},
            {"rope.dimension_count": 2, "own.windows": [20]},
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7,
             "num_hidden_layers": 3, "max_window_layers": 2},
            {"own.windows": [0, 0, 7]},
        ),
        (
            {"model_type": "exaone4", "sliding_window": 7, "num_hidden_layers": 3,
             "sliding_window_pattern": "LG"},
            {"attention.sliding_window_pattern": [True, False, True], "own.has_windows": True},
        ),
        (
            {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 1],
             "layer_types": ["full_attention"] * 5, "no_rope_layer_interval": 4},
            {"own.rotates": [True, False, True, True, True]},
        ),
        (
            {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 100.0}},
            {"rope.freq_base": 1e4 * 100.0**2},
        ),
        (
            {"model_type": "nemotron_h", "hidden_act": "absent", "num_hidden_layers": 3,
             "hybrid_override_pattern": "M*-", "mamba_num_heads": 4, "mamba_head_dim": 2,
             "rope_theta": "absent"},
            {"attention.head_count_kv": [0, 1, 0], "feed_forward_length": [0, 0, 16],
             "ssm.inner_size": 8},
        ),
    ],
)  # fmt: skip
def test_what_families_add(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = keys_of(**fields)
    found = {key: np.asarray(value).tolist() for key, value in found.items()}
    assert {key: found.get(key) for key in expected} == expected


_KIMI = {
    "model_type": "kimi_linear", "num_hidden_layers": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
_BAILING = {**_KIMI, "model_type": "bailing_hybrid", "short_conv_kernel_size": 4}
_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_SIZES = {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}
_EXPERTS = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (
            {**_KIMI, "first_k_dense_replace": 1, "linear_attn_config":
             {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 8,
              "short_conv_kernel_size": 4}},
            {**_KIMI, **_KINDS, **_SIZES, "mlp_layer_types": ["dense", "sparse"]},
        ),
        (
            {**_BAILING, "layer_group_size": 2, "head_dim": 8, "first_k_dense_replace": 1},
            {**_BAILING, **_KINDS, **_SIZES, "layer_group_size": 2, "head_dim": 4,
             "mlp_layer_types": ["dense", "sparse"], "mtp_loss_scaling_factor": 0.0},
        ),
        (
            {"model_type": "dbrx", "ffn_config": _EXPERTS},
            {"model_type": "dbrx", "ffn_config": {**_EXPERTS, "hidden_size": 8, "model_type": ""}},
        ),
    ],
)  # fmt: skip
def test_what_newer_versions_of_transformers_write_is_read_alike(
    older: dict[str, Any], newer: dict[str, Any]
) -> None:
    first, second = (
        {key: np.asarray(value).tolist() for key, value in keys_of(**of).items()}
        for of in (older, newer)
    )
    assert first == second


def test_dense_layers_of_kimi_linear_have_the_name_of_mixtures() -> None:
    """In folders that transformers 5 writes."""
    names = [f"model.layers.0.block_sparse_moe.{of}_proj.weight" for of in ("gate", "up", "down")]
    names.append("model.layers.1.block_sparse_moe.gate.weight")
    found = find_places(names, FAMILIES["kimi_linear"], {0: 0, 1: 1}, Path("a")).found
    kinds = [f"blk.0.ffn_{of}.weight" for of in ("gate", "up", "down")]
    assert list(found) == [*kinds, "blk.1.ffn_gate_inp.weight"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_heads": 3}, "'linear_num_heads' is 3; 2 are supported"),
        ({"layer_types": ["conv", "conv"]}, "linear_attention, full_attention are supported"),
    ],
)
def test_delta_rules_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        keys_of(**{**_BAILING, **_KINDS, **_SIZES, **fields})


def test_kinds_of_layers_that_disagree_are_refused() -> None:
    config = {"kda_layers": [2], "full_attn_layers": [1], "num_heads": 2}
    with pytest.raises(ConfigError, match=r"'linear_attn_config\.kda_layers' is"):
        keys_of(**{**_KIMI, **_KINDS, **_SIZES, "linear_attn_config": config})


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8, "rope_theta": 5e5}  # fmt: skip


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_a_scaling_added_by_hand_replaces_that_of_rope_parameters(kind: str) -> None:
    """Under either name of the kind; the base stays. Without a kind its numbers are added."""
    old = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": None}
    found, same = (
        keys_of(head_dim=128, rope_theta="absent", **fields)
        for fields in (
            {"rope_parameters": _LLAMA3, "rope_scaling": old},
            {"rope_parameters": {**old, "rope_theta": 5e5}},
        )
    )
    assert found["rope.freq_base"] == same["rope.freq_base"] == 5e5
    np.testing.assert_array_equal(found["rope_freqs.weight"], same["rope_freqs.weight"])
    plain = keys_of(rope_parameters=_LLAMA3, rope_scaling={kind: "default"})
    assert "rope_freqs.weight" not in plain
    for nothing in ({}, {kind: None, "factor": None}):
        llama = keys_of(rope_parameters=_LLAMA3, rope_scaling=nothing)
        np.testing.assert_array_equal(
            llama["rope_freqs.weight"], keys_of(rope_parameters=_LLAMA3)["rope_freqs.weight"]
        )
    with pytest.raises(UnsupportedError, match="RoPE 'ntk' is not supported"):
        keys_of(rope_parameters=_LLAMA3, rope_scaling={kind: "ntk", "factor": 2.0})


def test_longrope_has_two_sets_of_factors() -> None:
    scaling = {"type": "longrope", "long_factor": [4.0, 8.0], "short_factor": [1.0, 1.5]}
    found = keys_of(model_type="phi3", rope_scaling=scaling, original_max_position_embeddings=8)
    assert list(found["rope_factors_long.weight"]) == [4.0, 8.0]
    assert list(found["rope_factors_short.weight"]) == [1.0, 1.5]
    assert found["own.rope_magnitude"] == math.sqrt(1 + math.log(4) / math.log(8))
    assert found["own.rope_original"] == 8


def test_yarn_is_that_of_its_paper() -> None:
    """Pairs that turn more than beta_fast times in the original context keep their frequency, those
    that turn less than beta_slow times are divided by the factor."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    found = keys_of(head_dim=128, rope_scaling=scaling)
    divisors = found["rope_freqs.weight"]
    turns = 4096 / (2 * math.pi * 1e4 ** (np.arange(64) / 64))
    assert (divisors[turns > 40] == 1.0).all()
    assert (divisors[turns < 0.9] == 4.0).all()
    between = divisors[(turns > 1.5) & (turns < 25)]
    assert (np.diff(between) > 0).all()
    assert len(between) > 10
    assert found["own.rope_magnitude"] == 0.1 * math.log(4.0) + 1.0


def test_adapters_of_pictures_and_speech_are_unused() -> None:
    """Of Phi-4-multimodal as it is published."""
    objects = {"audio_processor": {"name": "a"}, "embd_layer": {"image_embd_layer": {"b": 1}}}
    fields = {"vision_lora": {"r": 256}, "speech_lora": {"r": 320}, "full_attn_mod": 1, **objects}
    assert keys_of(**fields, model_type="phi4mm") == keys_of(model_type="phi3")
    module = "model.layers.0.mlp.down_proj"
    names = [f"{module}.lora_{side}.{of}.weight" for side in "AB" for of in ("vision", "speech")]
    names += ["model.embed_tokens_extend.image_embed.a", f"{module}.base_layer.weight"]
    places = find_places(names, FAMILIES["phi4mm"], {0: 0}, Path("a"))
    assert list(places.found) == ["blk.0.ffn_down.weight"]
    assert places.unused == tuple(names[:-1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new_field": 3}, r"unknown field 'new_field' \(3\): remove it if it does not change"),
        ({"rope_interleaved": True}, "'rope_interleaved' is True; False is supported"),
        ({"router": {"top_k": 3}}, r"unknown field 'router.top_k' \(3\)"),
        ({"new\nfield": "\x1b[1m"}, r"unknown field ''new\\nfield'' \('\\x1b\[1m'\)"),
        ({"some": {"new": 3}}, r"unknown field 'some.new' \(3\)"),
        ({"hidden_act": "relu"}, "'hidden_act' is relu; 'silu' or 'swish' is supported"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' is True; False is supported"),
        ({"rope_scaling": {"type": "odd", "factor": 2.0}}, "RoPE 'odd'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "unknown field 'odd'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'long_factor' is not 2 numbers"),
        ({"rope_scaling": 3}, "'rope_scaling' is 3"),
        ({"rope_theta": "x"}, "'rope_theta' is x"),
        ({"partial_rotary_factor": 2.0}, "'partial_rotary_factor' is 2.0"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"n_layer": 2}, "'n_layer' is 2, another field says 1"),
        ({"num_attention_heads": True}, "'num_attention_heads' is True"),
        ({"hidden_size": "absent"}, "'hidden_size' is None"),
        ({"intermediate_size": "16"}, "'intermediate_size' is 16, a text: expected a number"),
        ({"hidden_size": 8.5}, "'hidden_size' is 8.5"),
        ({"head_dim": "4"}, "'head_dim' is 4, a text: expected an integer"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1, an integer: expected true or"),
        ({"intermediate_size": [16, 8]}, r"'intermediate_size' is \[16, 8\]"),
        ({"rms_norm_eps": math.inf}, "'rms_norm_eps' is inf"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        (
            {"head_dim": 2**31 - 2, "rope_scaling": LLAMA3_SCALING},
            "'head_dim': 2,147,483,646 values of a head, at most 16,384 are supported",
        ),
        ({"hidden_size": 1 << 30, "rope_scaling": LLAMA3_SCALING}, "'hidden_size': 1,073,741,824"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers': 1,000,000 layers, at most 512"),
        ({"num_attention_heads": 10**6}, "'num_attention_heads': 1,000,000 heads"),
        ({"layer_types": ["odd"]}, r"'layer_types' is \['odd'\]; sliding_attention"),
        ({"layer_types": []}, "'layer_types' is 0 kinds for 1 layers"),
        ({"no_rope_layers": [1]}, "unknown field 'no_rope_layers'"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 1]}, "'no_rope_layers' is 2 flags for 1"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": 3}, "'norm_topk_prob' is 3"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "'mlp_only_layers' is"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "only ALiBi is supported"),
        (
            {"model_type": "deepseek_v3", "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
             "v_head_dim": 4, "kv_lora_rank": 4, "scoring_func": "odd"},
            "'scoring_func' is odd; softmax, sigmoid",
        ),
        ({"model_type": "minimax", "layer_types": ["x" * 100]}, "'layer_types' is"),
        ({"model_type": "granitemoehybrid", "layer_types": ["odd"]}, "mamba, linear_attention are"),
        ({"model_type": "lfm2", "layer_types": ["odd"]}, "conv, full_attention are supported"),
        *(
            ({"model_type": "gemma3n_text", "num_hidden_layers": 35, "hidden_act": "absent",
              **changed}, message)
            for changed, message in (
                ({"num_kv_shared_layers": 10}, "'num_kv_shared_layers' is 10; 15 is supported"),
                ({"num_hidden_layers": 30}, "'num_kv_shared_layers' is 15; 10 is supported"),
                ({"activation_sparsity_pattern": [0.9] * 35}, "0.95 in 10 layers is supported"),
                ({"num_hidden_layers": 5, "num_kv_shared_layers": 0}, "0.95 in 10 layers"),
                ({"final_logit_softcapping": 20.0}, "'final_logit_softcapping' is 20.0"),
                ({"vocab_size": 1 << 30}, "tokens of a vocabulary"),
            )
        ),
        *(
            ({"model_type": "chameleon", "vocabulary_map": {"<s>": 0, **names}},
             "'vocabulary_map' is .*; names IMGIMG... of 4 to 8195 are supported")
            for names in ({}, {"IMGIMGAZ": 4}, {"IMGIMGAZ": "4"})
        ),
        (
            {"model_type": "muse_glimmer_text", "layer_rope_theta": [10000.0]},
            r"'layer_rope_theta' is \[10000.0\]; RoPE in all layers with a window",
        ),
        (
            {"model_type": "minimax_m3_vl_text", "head_dim": 64, "rotary_dim": 32,
             "shared_intermediate_size": 16},
            "'rotary_dim' is 32; 1.0 of a head is supported",
        ),
        (
            {"model_type": "minimax_m3_vl_text", "shared_intermediate_size": 24},
            "'shared_intermediate_size' is 24; a multiple of 16",
        ),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 2}, "2 kinds for 1 layers"),
        ({"model_type": "gemma4_text", "layer_types": ["odd"]}, "full_attention, sliding"),
        ({"head_dim": 65, "rope_scaling": LLAMA3_SCALING}, "RoPE of 65 values, expected an even"),
        ({"rope_theta": 1 + 1e-15, "rope_scaling": YARN}, "'rope_theta' is 1.0"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -10 / math.log(2.0)}},
         "'mscale_all_dim' is -14"),
        ({**LATENT, "rope_scaling": YARN | {"mscale_all_dim": 1e200}}, "'mscale_all_dim' is 1e"),
        ({"model_type": "granite_swa", "layer_rope_theta": [1.0], "rope_theta": "absent",
          "rope_parameters": {"rope_theta": [1]}}, r"'rope_theta' is \[1\]"),
        *(
            ({"model_type": "gemma4_text", "hidden_act": "absent", "attention_k_eq_v": True,
              "layer_types": ["full_attention"], "num_global_key_value_heads": heads},
             "'num_global_key_value_heads' is")
            for heads in (0, -1, 1 << 40)
        ),
        *(
            ({"model_type": "lfm2", "hidden_act": "absent", "block_auto_adjust_ff_dim": True,
              "block_ffn_dim_multiplier": factor}, "'block_ffn_dim_multiplier' is")
            for factor in (0.0, -1.0, 1e308)
        ),
        ({"model_type": "mistral", "sliding_window": 16, "sliding_window_size": 8},
         "'sliding_window_size' is 8, 'sliding_window' is 16"),
        ({"model_type": "nemotron_h", "hidden_act": "absent", "hybrid_override_pattern": "X"},
         "'hybrid_override_pattern' is X"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        keys_of(**fields)


_ODD = (
    None, True, -1, 0, 3, 2**31, 2**63, 10**400, 0.5, -1e308, 1e308, math.nan, math.inf, "", "silu",
    [], [[]], ["full_attention"], [1], {}, {"a": []}, {"rope_type": []}, {"rope_type": "llama3"},
    {"factor": 10**400, "type": "yarn"}, {"rope_type": "longrope", "long_factor": [{}]},
    {"full_attention": 3}, {"full_attention": {}, "sliding_attention": []},
)  # fmt: skip
#: Fields that some families require, so that what follows them is reached.
_NEEDED = {
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "kv_lora_rank": 4,
    "hybrid_override_pattern": "M", "layer_types": ["full_attention"],
    "layers_block_type": ["hybrid"],
    "linear_key_head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "attn_config": {"alibi": True},
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [], "num_heads": 2,
                           "head_dim": 4, "short_conv_kernel_size": 4},
}  # fmt: skip
_SCALINGS = (
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0],
     "original_max_position_embeddings": 8},
)  # fmt: skip


def _asked_fields(config: dict[str, Any], family: Family) -> set[str]:
    """The names of the fields that a family asks for."""
    asked: set[str] = set()

    class Asked(Fields):
        def take(self, name: str, kind: Any) -> Any:
            asked.add(name)
            return super().take(name, kind)

    with pytest.MonkeyPatch.context() as patch, suppress(ConfigError, UnsupportedError):
        patch.setattr("urdir.model.files.pretrained.config.Fields", Asked)
        read_config(config, family, Path("config.json"))
    return asked


def test_tokens_without_embeddings_of_layers_have_those_of_the_first() -> None:
    assert tokens_or_first({"own.tokens": 5}, 3).tolist() == [0, 1, 2, 0, 0]
    assert tokens_or_first({"own.tokens": 2}, 3).tolist() == [0, 1]


@pytest.mark.turns(3)
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_odd_values_are_refused_or_read(model_type: str) -> None:
    """Whatever stands in a field: metadata, or an error that a user is told."""
    family = FAMILIES[model_type]
    asked = _asked_fields({**CONFIG, **_NEEDED, "model_type": model_type}, family)
    needed = {
        name: value
        for name, value in _NEEDED.items()
        if any(of == name or of.startswith(f"{name}.") for of in asked)
    }
    if family.architecture == "deepseek4":
        needed |= {"layer_types": ["sliding_attention"], "qk_rope_head_dim": 4}
    if family.architecture == "dots3note":
        needed |= {"q_lora_rank": 4, "swa_q_lora_rank": 4, "swa_qk_rope_head_dim": 4}
    if family.architecture == "gemma3n":
        needed |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95]}
    if family.architecture == "glm5-next":
        needed |= {"qk_rope_head_dim": 0, "q_lora_rank": 4, "linear_num_heads": 2}
        needed |= {"num_key_value_heads": 2}
    if family.architecture == "qwen4exp":
        needed |= {"indexer_compress_ratio": 4, "ple_layer_ids": [1], "eos_token_id": 1}
        needed |= {"heads_per_ngram": 2, "ngram_vocab_size_base": 100}
    if model_type == "ernie4_5_vl_moe_text":
        needed |= {"moe_intermediate_size": [4, 4]}
    base = {"hidden_act": "absent", **needed}
    names = {*CONFIG, *family.keys, *family.fixed, *asked, "rope_scaling", "rope_parameters"}
    cases = [{name: odd} for name in sorted(names - {"model_type"}) for odd in _ODD]
    for scaling in _SCALINGS:
        scaled = [{"rope_scaling": scaling | {key: odd}} for key in scaling for odd in _ODD]
        cases += [
            *scaled,
            *({"rope_scaling": scaling, name: odd} for name in CONFIG for odd in _ODD),
        ]
    outcomes = set()
    for case in cases:
        try:
            keys_of(**{**base, **case, "model_type": model_type})
            outcomes.add("read")
        except (ConfigError, UnsupportedError):
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_what_older_versions_of_transformers_write_changes_nothing(model_type: str) -> None:
    """Every configuration had the settings of generation, and text_config still has."""
    given = {"model_type": model_type} | (GPT2 if model_type == "gpt2" else {})
    given |= {"hidden_act": "absent"}
    written = {
        "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False,
        "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0,
        "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
        "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "bad_words_ids": None, "num_return_sequences": 1, "output_scores": False,
        "return_dict_in_generate": False, "forced_bos_token_id": 1, "forced_eos_token_id": None,
        "remove_invalid_values": False, "exponential_decay_length_penalty": None,
        "suppress_tokens": [], "begin_suppress_tokens": None, "tf_legacy_loss": False,
        "output_past": True, "num_labels": 2, "max_sequence_length": 4096,
        "attn_implementation": "sdpa", "neftune_noise_alpha": 5.0,
        "keys_to_ignore_at_inference": ["past_key_values"], "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.1,
        # SmolLM2's and SmolVLM's, of which the class reads none
        "is_llama_config": True, "rope_interleaved": False, "qk_layer_norms": False,
        "use_resampler": False, "pixel_shuffle_factor": 4,
        "perceiver_config": {"resampler_depth": 6, "top_k": 50, "hidden_act": "relu"},
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}, "dtype": "q4"},
    }  # fmt: skip
    expected, found = keys_of(**given), keys_of(**given, **written)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in found)


def _text_keys(inner: dict[str, Any]) -> dict[str, Any]:
    """Keys of the decoder of a multi-modal model."""
    config = text_config({"model_type": "llava", "text_config": inner})
    return dict(read_config(config, FAMILIES[inner["model_type"]], Path("config.json")).keys)


def test_an_inner_configuration_leaves_out_what_its_class_has() -> None:
    """That of llava-1.5-7b-hf, and of a Qwen3-VL that was saved again."""
    llava = {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
        "torch_dtype": "float16", "vocab_size": 32064,
    }  # fmt: skip
    found = _text_keys(llava)
    assert (found["embedding_length"], found["block_count"], found["context_length"]) == (
        4096, 32, 4096,
    )  # fmt: skip
    assert (found["feed_forward_length"], found["attention.head_count"]) == (11008, 32)
    found = _text_keys({"model_type": "qwen3_vl_text", "intermediate_size": 12288})
    assert (found["rope.freq_base"], found["feed_forward_length"]) == (5e6, 12288)
    assert (found["attention.key_length"], found["attention.head_count_kv"]) == (128, 32)
    assert "own.windows" not in _text_keys({"model_type": "mistral", "sliding_window": None})
    with pytest.raises(ConfigError, match="'num_hidden_layers' is None"):  # of a decoder alone
        keys_of(num_hidden_layers="absent")


@pytest.mark.parametrize("model_type", TEXT_DEFAULTS)
def test_defaults_of_inner_configurations_are_those_of_transformers(model_type: str) -> None:
    assert _text_keys({"model_type": model_type})["block_count"] > 1
    configurations = pytest.importorskip("transformers").AutoConfig
    configuration = configurations.for_model(model_type)
    expected = configuration.to_dict()
    if model_type.startswith("qwen3_vl"):  # 5e5 in 5.0.0, which writes it: 4.57 left out 5e6
        expected["rope_theta"] = 5e6
        expected.setdefault("norm_topk_prob", True)  # without the field, and always so
    for name, value in TEXT_DEFAULTS[model_type].items():
        found = expected.get(name, (expected.get("rope_parameters") or {}).get(name))
        found = getattr(configuration, name, None) if found is None else found  # renamed
        if isinstance(value, dict):
            assert found.items() >= (value.items() - {("rope_type", "yarn")})
        else:
            assert found == value, name


def test_integers_may_be_floats() -> None:
    """As Python's own JSON and transformers take them where they are whole."""
    sizes = {name: float(n) for name, n in CONFIG.items() if type(n) is int}
    assert keys_of(**sizes, head_dim=4.0) == keys_of(head_dim=4)
    assert all(type(found) is not float or found % 1 for found in keys_of(**sizes).values()
               if found != CONFIG["rope_theta"])  # fmt: skip
    assert keys_of(moe_layer_freq=1.0) == keys_of(moe_layer_freq=1) == keys_of()
    for other in (True, 1.5):  # 1 is the only value that is supported
        with pytest.raises(UnsupportedError, match="'moe_layer_freq' is"):
            keys_of(moe_layer_freq=other)
    floats = YARN | {"original_max_position_embeddings": 8.0}
    expected, found = (keys_of(rope_scaling=scaling) for scaling in (YARN, floats))
    assert found.keys() == expected.keys()
    assert np.array_equal(found["rope_freqs.weight"], expected["rope_freqs.weight"])
