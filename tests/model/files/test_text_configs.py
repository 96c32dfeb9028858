"""Text decoders within other models: the fields and tensors that are theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.files.pretrained.config import family_of, read_config, text_config
from urdir.model.files.pretrained.model import SafetensorsModel

_PATH = Path("config.json")
_SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 3,
}  # fmt: skip


def _keys(whole: dict[str, Any]) -> dict[str, Any]:
    config = dict(text_config(whole))
    return dict(read_config(config, family_of(config, _PATH), _PATH).keys)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        # LLaVA 1.5, Idefics 2, LLaVA 1.6 with Mistral 0.2, Qwen2-Audio
        ({"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
         (4096, 11008, 32, 32, 32, 0, 4096)),
        ({"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 512},
         (4096, 14336, 32, 32, 8, 512, 32768)),
        ({"model_type": "mistral", "sliding_window": None, "num_hidden_layers": 40},
         (4096, 14336, 40, 32, 8, 0, 131072)),
        ({"model_type": "qwen2", "intermediate_size": 11008},
         (4096, 11008, 32, 32, 32, 0, 32768)),
    ],
)  # fmt: skip
def test_fields_that_are_left_out_are_those_of_the_class(
    fields: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    found = _keys({"model_type": "a", "text_config": fields})
    kv, window = found.get("attention.head_count_kv", 32), found.get("own.windows", np.zeros(1))
    names = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
    read = (*(found[name] for name in names), kv, window[0], found["context_length"])
    assert read == sizes
    with pytest.raises(ConfigError, match="'num_hidden_layers' is None"):  # of the whole: an error
        _keys(fields | {"num_hidden_layers": None})


def test_sizes_by_another_name_are_those_of_the_text_config() -> None:
    text = {**_SIZES, "model_type": "qwen3_vl_moe_text", "num_local_experts": 4}
    assert _keys({"model_type": "a", "text_config": text})["expert_count"] == 4


def test_prompts_of_paligemma_are_no_causal_text() -> None:
    for given in ({}, {"use_bidirectional_attention": None}):
        text = {**_SIZES, **given, "model_type": "gemma"}
        with pytest.raises(UnsupportedError, match="'use_bidirectional_attention' is True"):
            _keys({"model_type": "paligemma", "text_config": text})
        assert _keys({"model_type": "a", "text_config": text})["block_count"] == 1


@pytest.mark.parametrize(
    ("model_type", "prefix", "others"),
    [
        ("qwen2_vl_text", "thinker.model", ("thinker.visual.a", "talker.a", "token2wav.a")),
        ("qwen2", "model.language_model", ("model.projector.a", "model.visual_embeddings_table.a")),
        ("granite", "language_model.model", ("encoder.layers.0.a", "projector.qformer.layer.0.a")),
        ("qwen3", "model.language_model", ("model.vision_encoder.a", "model.vision_projection.a")),
        ("llama", "language_model.model", ("image_tower.a", "video_tower.a")),
        ("llama", "model.language_model", ("model.vqmodel.a", "model.generation_head.proj_out.a")),
        ("llama", "model.language_model", ("model.aligner.a", "model.high_res_vision_alpha")),
        ("llama", "language_model.model", ("qformer.layer.0.a", "query_tokens")),
        ("llama", "language_model.model", ("language_projection.bias", "vision_model.a")),
        ("llama", "model.language_model", ("model.merger.mlp.0.a", "model.vision_tower.a")),
        ("nemotron_h", "language_model.model", ("mlp1.0.weight", "vision_model.a")),
        ("deepseek_ocr2_text", "model", ("model.sam_model.a", "model.qwen2_model.a")),
        ("step3p5", "model", ("vit_large_projector.weight", "vision_model.a")),
    ],
)
def test_other_parts_are_unused(
    model_type: str, prefix: str, others: tuple[str, ...], make_folder: Callable[..., Path]
) -> None:
    text: dict[str, Any] = {**_SIZES, "model_type": model_type}
    if model_type == "nemotron_h":
        text |= {"hybrid_override_pattern": "-", "ssm_state_size": 8, "mamba_num_heads": 2,
                 "mamba_head_dim": 8}  # fmt: skip
    whole: dict[str, Any] = {"model_type": "a", "text_config": text}
    if prefix.startswith("thinker"):
        whole = {"model_type": "a", "thinker_config": whole, "talker_config": {"hidden_size": 9}}
    elif "mlp1" in others[0]:  # InternVL, as it is published
        whole["llm_config"] = whole.pop("text_config")
    names = {f"{prefix}.embed_tokens.weight": (3, 8), **dict.fromkeys(others, (2, 2))}
    tensors = {name: ("F32", np.ones(shape, np.float32)) for name, shape in names.items()}
    with SafetensorsModel(make_folder(whole, tensors)) as model:
        assert set(model.tensors) == {"token_embd.weight"}
        assert set(model.unused_tensors) == set(others)


_GEMMA4 = {
    **_SIZES, "model_type": "gemma4_unified_text", "num_hidden_layers": 3, "head_dim": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


def test_layers_of_gemma4_have_sizes_of_their_own() -> None:
    wide = {"head_dim": 16, "num_key_value_heads": 1}
    found = _keys({**_GEMMA4, "per_layer_config": {"00": wide, "02": wide}})
    older = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    before = _keys({**_GEMMA4, **older})
    assert found.keys() == before.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, before[name])
    assert (found["attention.key_length"], found["attention.key_length_swa"]) == (16, 4)
    assert found["attention.head_count_kv"].tolist() == [1, 2, 1]
    for odd, message in (
        ({"0": wide}, "equal layers"),
        ({"0": wide, "2": {"head_dim": 8}}, "equal layers"),
        ({"0": 3, "2": 3}, "'per_layer_config' is 3"),
        ({"0": {"rms_norm_eps": 1.0}, "2": {"rms_norm_eps": 1.0}}, "unknown field 'rms_norm_eps'"),
        ({"0": {"head_dim": 0}, "2": {"head_dim": 0}}, "'head_dim' is 0"),
        ({key: {"num_key_value_heads": 1 << 20} for key in "02"}, "1,048,576 heads"),
        (3, "'per_layer_config' is 3"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=message):
            _keys({**_GEMMA4, "per_layer_config": odd})


@pytest.mark.parametrize("odd", [None, 48, [48], [48, 0], [0, 32], [48, 1 << 40], [48, "a"]])
def test_widths_of_ernies_experts(odd: object) -> None:
    fields = {**_SIZES, "model_type": "ernie4_5_vl_moe_text", "moe_num_experts": 4, "moe_k": 2,
              "moe_num_shared_experts": 3, "mlp_layer_types": ["sparse"]}  # fmt: skip
    found = _keys({**fields, "moe_intermediate_size": [48, 32]})
    assert found["expert_feed_forward_length"] == 48
    assert found["expert_shared_feed_forward_length"] == 3 * 48
    with pytest.raises(ConfigError, match="'moe_intermediate_size' is"):
        _keys({**fields, "moe_intermediate_size": odd})


def test_nemotron_without_experts_says_nothing_of_them() -> None:
    fields = {**_SIZES, "model_type": "nemotron_h", "layers_block_type": ["mlp"],
              "ssm_state_size": 8, "mamba_num_heads": 2, "mamba_head_dim": 8,
              "norm_topk_prob": True, "n_routed_experts": 8}  # fmt: skip
    assert not [key for key in _keys(fields) if key.startswith("expert_")]
    fields["layers_block_type"] = ["moe"]
    assert _keys(fields)["expert_weights_norm"] is True
