"""Folders that transformers writes of tiny models with random weights, against its own logits.

Making them needs the extra `folders` (torch and transformers), which `dev` does not have. They
are kept in pytest's cache or in ``--made-folders DIR``, under a name with a digest of what they
are made of: another run needs no transformers. Tests without a folder are skipped. They cover
classes that no reference has. Folders are F32, so that numpy's logits are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.families.config import Config
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.verify.conformance import relative_rms

#: The file of a folder with tokens and the class's logits.
_GOLDEN = "golden.npz"
Keep = Callable[[str, Any, Callable[[Path], None]], Path]

_BASE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_WINDOWS = {
    "sliding_window": 20,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "num_key_value_heads": 2,
}  # fmt: skip
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, **_MOE}
_SCALED = {
    "attention_multiplier": 0.1, "residual_multiplier": 0.3, "embedding_multiplier": 5.0,
    "logits_scaling": 3.0,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip
_SPARSE = {
    **_LATENT, **_ROUTED, "first_k_dense_replace": None, "index_n_heads": 16, "index_head_dim": 32,
    "index_topk": 16, "hc_mult": 4,
}  # fmt: skip
_HYBRID = {
    "head_dim": 32, "mamba_head_dim": 16, "mamba_num_heads": 8, "n_groups": 2,
    "ssm_state_size": 32, "time_step_min": 1e-9,
}  # fmt: skip
_PATCHES = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64
}  # fmt: skip
#: Of positions on three axes; those of text are equal.
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_SHORT = {**_SECTIONS, "mrope_section": [3, 3, 2]}
_QWEN4 = {
    "moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4, "head_dim": 32,
    "shared_expert_intermediate_size": 32, "intermediate_size": None, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_lowrank": 8,
    "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "split_ngram_parts": 2,
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
#: Prefixes of classes, and the fields that differ from `_BASE` (None: absent).
DECODERS: dict[str, dict[str, Any]] = {
    "Afmoe": {**_MOE, **_WINDOWS, "num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1,
              "route_scale": 2.0, "head_dim": 32, "mup_enabled": True},
    "BitNet": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "BioGpt": {"num_key_value_heads": None, "pad_token_id": 1},
    "CodeGen": {"num_attention_heads": 4, "rotary_dim": 8, "num_key_value_heads": None,
                "intermediate_size": None, "n_ctx": 512},
    "Cohere": {},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Flint": {**_MOE, **_WINDOWS, "num_experts": 4, "shared_expert_intermediate_size": 32,
              "head_dim": 32, "mlp_only_layers": [0]},
    "GPTNeo": {"num_key_value_heads": None, "intermediate_size": None, "window_size": 20,
               "attention_types": [[["global", "local"], 2]]},
    "Helium": {"head_dim": 32},
    "HyperCLOVAX": {**_SCALED, "head_dim": 32},
    "Lfm3": {"head_dim": 32, "sliding_window": 20, "rope_parameters": None,
             "layer_types": ["conv", "conv", "full_attention", "sliding_attention"]},
    "AXK1": {**_LATENT, **_ROUTED, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},

    "ModernBertDecoder": {"local_attention": 40, "pad_token_id": 1, "cls_token_id": 0,
                          "sep_token_id": 1, "num_key_value_heads": None},
    "NanoChat": {"intermediate_size": 96, "hidden_act": "relu2"},
    "Persimmon": {"num_key_value_heads": None, "hidden_act": "relu2"},
    "Phi4Multimodal": {
        "vision_config": _VISION, "pad_token_id": 1,
        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                         "num_attention_heads": 2, "ext_pw_out_channel": 32,
                         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "XGLM": {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 96,
             "pad_token_id": 1},
    "VaultGemma": {"head_dim": 32, "sliding_window": 20},
    "Youtu": _LATENT,
    "Cohere2Moe": {**_WINDOWS, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
                   "num_shared_experts": 1},
    "Cwm": {"sliding_window": 20, "head_dim": 32},
    "DeepseekV32": {**_LATENT, **_ROUTED, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16},
    "DeepseekV3": {**_LATENT, **_ROUTED, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "ExaoneMoe": {**_MOE, **_WINDOWS, "num_experts": 4, "head_dim": 32, "sliding_window_pattern": 4,
                  "first_k_dense_replace": 1},
    "GPTBigCode": {"num_key_value_heads": None, "intermediate_size": None},
    "GPTNeoX": {"num_key_value_heads": None, "use_parallel_residual": False, "rotary_pct": 0.5},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": 20},
    "Glm4MoeLite": {**_LATENT, **_ROUTED},
    "Granite": _SCALED,
    "GraniteMoeHybrid": {**_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 96,
                         "position_embedding_type": "rope"},
    "GraniteMoeSWA": {**_WINDOWS, **_SCALED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeShared": {"num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 48},
    "GraniteSWA": {**_WINDOWS, **_SCALED},
    "HYV3": {**_MOE, "num_experts": 4, "head_dim": 32},
    "HYV4": _SPARSE,
    "Jais2": {"hidden_act": "relu2"},
    "Laguna": {**_MOE, **_WINDOWS, "num_experts": 4, "shared_expert_intermediate_size": 32,
               "head_dim": 32},
    "Mellum": {**_MOE, **_WINDOWS, "num_experts": 4, "head_dim": 32},
    "MiMoV2Flash": {**_MOE, "n_routed_experts": 4, "head_dim": 32, "v_head_dim": 16,
                    "sliding_window": 20},
    "MiniCPM3": _LATENT,
    "Mistral4": {**_LATENT, **_ROUTED},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    # the class alone has a least time step of 0.001
    "NemotronH": {**_HYBRID, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    "Olmo2": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    "Qwen3Moe": {**_MOE, "num_experts": 4, "head_dim": 32},
    "SolarOpen": {**_ROUTED, "first_k_dense_replace": None, "head_dim": 32},
    "StableLm": {},
}  # fmt: skip
#: Multi-modal models: fields of the text decoder, and of the vision tower.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Ernie4_5_VLMoe": ({"moe_intermediate_size": [48, 32], "moe_k": 2, "moe_num_experts": 4,
                        "rope_parameters": {**_SECTIONS, "mrope_section": [5, 5, 6]}},
                       {**_PATCHES, "hidden_size": 64}),
    # of more than ten layers, whose numbers have two digits then
    "Gemma4": ({"head_dim": 32, "num_hidden_layers": 12, "pad_token_id": 0, "sliding_window": 20,
                "per_layer_config": {layer: {"head_dim": 64} for layer in (5, 11)},
                "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
                "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
                "rope_parameters": None}, None),
    "Gemma4Unified": ({"head_dim": 32, "per_layer_config": {1: {"head_dim": 64},
                       3: {"head_dim": 64}}, "pad_token_id": 0, "sliding_window": 20,
                       "layer_types": ["sliding_attention", "full_attention"] * 2,
                       "rope_parameters": None}, None),
    "Glm5Next": (
        {**_LATENT, **_ROUTED, "first_k_dense_replace": None, "qk_rope_head_dim": None,
         "mlp_layer_types": ["dense", *["sparse"] * 3], "num_attention_heads": 2,
         "layer_types": ["indexed_attention", "linear_attention"] * 2, "linear_head_dim": 32,
         "linear_num_heads": 2, "linear_lower_bound": -4.0, "index_n_heads": 16,
         "index_head_dim": 32, "index_topk": 16, "index_kpool": 4, "swiglu_limit": 1.5,
         "hc_sinkhorn_iters": 3, "routed_scaling_factor": 1.5, "rope_parameters": None},
        {**_PATCHES, "out_hidden_size": 64, "projection_intermediate_size": 48},
    ),
    "Glm4v": ({}, _PATCHES),
    "Glm4vMoe": ({**_ROUTED, "head_dim": 32,
                  "rope_parameters": {**_SHORT, "partial_rotary_factor": 0.5}}, _PATCHES),
    "GlmOcr": ({"head_dim": 32}, _PATCHES),
    "GraniteDocling": ({**_SCALED, "rope_parameters": None}, {**_VISION, "out_hidden_size": 64,
                       "deepstack_visual_indexes": [0], "image_size": 64}),
    "HYV4VL": ({**_SPARSE, "rope_parameters": _SHORT}, {**_VISION, "out_hidden_size": 64}),
    "HunYuanVL": ({"head_dim": 32}, {**_VISION, "text_hidden_size": 64, "out_hidden_size": 64}),
    "MuseGlimmer": (
        {"head_dim": 32, "sliding_window": 20, "num_hidden_layers": 6, "qk_scale_factor": 2.5,
         "output_multiplier": 0.7, "final_logit_softcapping": 3.0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "PaddleOCRVL": ({"head_dim": 32}, _VISION),
    "Qwen4Exp": (
        {**_QWEN4, "output_gate_type": "sigmoid", "ple_layer_ids": [3]},
        {**_PATCHES, "num_position_embeddings": 16},
    ),
    "Qwen3VLMoe": ({**_MOE, "num_experts": 4, "head_dim": 32},
                   {**_PATCHES, "deepstack_visual_indexes": [0]}),
    "Step3p7": ({**_MOE, "head_dim": 32, "n_routed_experts": 4, "share_expert_dim": 48,
                 "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"] * 2,
                 "num_sliding_attention_heads": 4, "pad_token_id": 1, "rope_parameters": None,
                 "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
                {**_VISION, "image_size": 56}),
}  # fmt: skip
_VQ = {
    "embed_dim": 8, "latent_channels": 8, "resolution": 16, "base_channels": 32,
    "channel_multiplier": [1], "num_res_blocks": 1,
}  # fmt: skip


def _letters(number: int) -> str:
    """A number by letters, as Chameleon's tokens of pictures have it."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


#: Further classes: of the configuration and of the model, and fields as above.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{
        f"chameleon, swin_norm {swin}": (
            "ChameleonConfig", "ChameleonForConditionalGeneration",
            {"vocab_size": 8448, "swin_norm": swin, "vq_config": _VQ, "vocabulary_map":
             {"<image>": 8400, **{f"IMGIMG{_letters(n)}Z": 4 + n for n in range(8192)}},
             "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        )
        for swin in (False, True)
    },
    "gemma3n_text": (
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        {"num_hidden_layers": 25, "num_kv_shared_layers": 5, "head_dim": 32, "sliding_window": 20,
         "vocab_size_per_layer_input": 300, "rms_norm_eps": 1e-5},
    ),
    "openai-gpt": (
        "OpenAIGPTConfig", "OpenAIGPTLMHeadModel",
        {"num_key_value_heads": None, "intermediate_size": None},
    ),
    "cosmos3_edge_text": (
        "Cosmos3EdgeConfig", "Cosmos3EdgeForConditionalGeneration",
        {"text_config": {**_BASE, "head_dim": 32, "rope_parameters": _SECTIONS},
         "vision_config": {**_VISION, "patch_size": 2, "num_patches": 16}},
    ),
    "cohere_compass_text": (
        "CohereCompassTextConfig", "CohereCompassForCausalLM",
        {**_WINDOWS, "head_dim": 32, "logit_scale": 0.7,
         "rope_parameters": {"sliding_attention": _SECTIONS, "full_attention": None}},
    ),
    "aria_text": (
        "AriaTextConfig", "AriaTextForCausalLM",
        {"moe_num_experts": 4, "moe_topk": 2, "pad_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "mllama_text_model": (
        "MllamaTextConfig", "MllamaForCausalLM",
        {"num_hidden_layers": 6, "cross_attention_layers": [1, 4], "pad_token_id": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "emu3_text_model": (
        "Emu3TextConfig", "Emu3ForCausalLM",
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "granite4_vision_text": (
        "Granite4VisionConfig", "Granite4VisionForConditionalGeneration",
        {"text_config": {**_SCALED, **_BASE, "model_type": "granite4_vision_text"},
         "vision_config": {**_VISION, "model_type": "siglip_vision_model", "hidden_size": 64,
                           "image_size": 32, "patch_size": 8}, "downsample_rate": "1/2",
         "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [0, 1, 2, 3]},
    ),
    "qwen4_exp_text": (
        "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {**_QWEN4, "rope_parameters": _SHORT},
    ),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16,
         "shared_intermediate_size": 128, "dense_intermediate_size": 96, "index_n_heads": 1,
         "index_block_size": 16, "index_topk_blocks": 3, "index_head_dim": 32,
         "mlp_layer_types": ["dense", *["sparse"] * 3],
         "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
         "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0,
                             "partial_rotary_factor": 0.5}},
    ),
}  # fmt: skip


#: Weights that are that many times as small: many layers of larger ones make differences grow, also
#: those between the class in float32 and in float64.
_SMALLER = {"gemma3n_text": 4.0}


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """A folder by its name and what it is made of, made if it is not kept."""
    chosen = request.config.getoption("--made-folders")
    root = Path(chosen or request.config.cache.mkdir("made_folders"))

    def kept(name: str, made_of: Any, make: Callable[[Path], None]) -> Path:
        text = json.dumps(made_of, sort_keys=True).encode()
        folder = root / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}"
        if not (folder / _GOLDEN).exists():  # written last
            pytest.importorskip("torch")
            pytest.importorskip("transformers")
            folder.mkdir(parents=True, exist_ok=True)
            make(folder)
        return folder

    return kept


def _write_golden(folder: Path, tokens: Any, logits: Any) -> None:
    part = folder / f"part-{_GOLDEN}"
    np.savez(part, tokens=tokens[0].numpy(), logits=logits.numpy())
    part.rename(folder / _GOLDEN)


def _error(folder: Path, reference_model: Any) -> float:
    """How far numpy's logits are from those of the class."""
    with np.load(folder / _GOLDEN) as golden:
        tokens, wanted = golden["tokens"], golden["logits"]
    with SafetensorsModel(folder) as file:
        logits = reference_model(file, Config.of(file), 512).logits(tokens)
    shown = wanted > np.finfo(np.float32).min  # others are tokens that are never chosen
    assert np.array_equal(logits > np.finfo(np.float32).min, shown)
    return relative_rms(logits[shown], wanted[shown])


def _make(folder: Path, model_class: str, config_class: str, fields: dict[str, Any]) -> None:
    import torch
    import transformers

    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    config = getattr(transformers, config_class)(**fields)
    deviation = 1.2 / _SMALLER.get(config.model_type, 1.0)
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, model_class)(config).float().eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.dim() < 2:
                values.add_(0.1 * torch.randn_like(values))
            else:
                values.normal_(0.0, deviation / values.shape[-1] ** 0.5)
        for name, values in model.named_buffers():
            # a mask of GPT is a buffer of four dimensions
            if "bias" in name and values.is_floating_point() and values.dim() < 4:
                values.normal_(0.0, 0.1)
        tokens = torch.randint(2, 320, (1, 48))
        wanted = model(tokens).logits[0]
        more = model.get_input_embeddings().num_embeddings - wanted.shape[1]  # never chosen
        wanted = torch.nn.functional.pad(wanted, (0, more), value=torch.finfo(wanted.dtype).min)
    model.save_pretrained(folder)
    _write_golden(folder, tokens, wanted)


def _check(
    model_class: str, config_class: str, fields: dict[str, Any], keep: Keep, reference_model: Any
) -> None:
    folder = keep(
        model_class,
        [config_class, fields, _SMALLER],
        lambda folder: _make(folder, model_class, config_class, fields),
    )
    assert _error(folder, reference_model) < 1e-4


def filled(changed: dict[str, Any]) -> dict[str, Any]:
    dropped = {name for name, value in changed.items() if value is None}
    return {name: value for name, value in {**_BASE, **changed}.items() if name not in dropped}


@pytest.mark.parametrize("prefix", DECODERS)
def test_decoders(prefix: str, keep: Keep, reference_model: Any) -> None:
    fields = filled(DECODERS[prefix])
    _check(f"{prefix}ForCausalLM", f"{prefix}Config", fields, keep, reference_model)


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_classes(model_type: str, keep: Keep, reference_model: Any) -> None:
    config, model, fields = OTHERS[model_type]
    _check(model, config, filled(fields), keep, reference_model)


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_text_decoders_of_multi_modal_models(prefix: str, keep: Keep, reference_model: Any) -> None:
    text, vision = WRAPPERS[prefix]
    text = filled({"rope_parameters": _SECTIONS, **text})
    fields = {"text_config": text, "vision_config": vision}
    model = f"{prefix}ForConditionalGeneration"
    _check(model, f"{prefix}Config", fields, keep, reference_model)


@pytest.mark.parametrize(
    ("linear", "mode"),
    [("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")],
)
@pytest.mark.filterwarnings("ignore:.* are rounded to f16:UserWarning")
def test_ternary_weights(
    linear: str, mode: str, keep: Keep, reference_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BitNet's own layers, with activations that are not rounded."""
    folder = keep(
        "BitNet", [linear, mode], lambda folder: _make_ternary(folder, linear, mode, monkeypatch)
    )
    # f16 has the scale that multiplies, not its inverse and not a mean
    has_scale = (linear, mode) == ("autobitlinear", "offline")
    assert _error(folder, reference_model) < (1e-5 if has_scale else 5e-4)


def _make_ternary(folder: Path, linear: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.integrations import bitnet
    from transformers.utils.quantization_config import BitNetQuantConfig

    monkeypatch.setattr(bitnet.BitLinear, "activation_quant", lambda self, x: (x, 1.0))
    monkeypatch.setattr(bitnet.ActQuant, "apply", staticmethod(lambda x: x))
    config = transformers.BitNetConfig(**filled({"hidden_size": 256, "intermediate_size": 256}))
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = transformers.BitNetForCausalLM(config).float().eval()
    quantised = BitNetQuantConfig(linear_class=linear, quantization_mode=mode)
    model = bitnet.replace_with_bitnet_linear(model, ["lm_head"], quantised)
    stored = {}
    for name, module in model.named_modules():
        if not isinstance(module, bitnet.BitLinear | bitnet.AutoBitLinear):
            continue
        shape = (module.out_features, module.in_features)
        signs = torch.randint(-1, 2, shape).float()
        scale = torch.tensor([40.0 if linear == "bitlinear" else 0.025]).bfloat16().float()
        packed = bitnet.pack_weights(signs.clone())
        if mode == "online":
            weights = 0.05 * torch.randn(shape)
            module.weight = torch.nn.Parameter(weights, requires_grad=False)
            stored[f"{name}.weight"] = weights
            continue
        stored |= {f"{name}.weight": packed, f"{name}.weight_scale": scale}
        module.weight_scale, module.dtype = scale, torch.float32
        if linear == "bitlinear":
            module.weight = packed
        else:
            module.weight = torch.nn.Parameter(signs, requires_grad=False)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, values in model.named_parameters():
            if not name.endswith("_proj.weight"):
                values.normal_(0.0, 1 / 16 if values.dim() > 1 else 0.1)
                stored[name] = values.clone()
        tokens = torch.randint(2, 320, (1, 48))
        wanted = model(tokens).logits[0]
    config.quantization_config = quantised
    config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors")
    _write_golden(folder, tokens, wanted)
