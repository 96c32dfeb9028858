"""Folders made of llama.cpp's references: the same weights as transformers would publish them give
llama.cpp's logits (`golden_folders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from tests.model.files.golden_folders import (
    CASES,
    CONTEXT,
    RMS,
    SIZES,
    TOLERANCE,
    Case,
    Values,
    apart,
    apart_altup,
    half_style,
    less_one,
    of_gemma3n,
    published_names,
)
from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures import gemma3n
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.tensors import vector
from urdir.model.memory.vectors import vector_values
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.kernels.rotation import RopeScaling, frequencies


def _published(values: Values, names: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    modules = (
        ".fn",
        ".base",
        ".scale",
        "_fn",
        "_base",
        "_scale",
        "A_log",
        ".D",
        "dt_bias",
        "correction_bias",
        "sinks",
        "experts.gate_up_proj",
        "experts.down_proj",
    )
    for name, of in values.items():
        stored = names(name)
        base, _, suffix = stored.rpartition(".")
        if suffix == "bias" and base.endswith(("gate_up_proj", "experts.down_proj")):
            stored = f"{base}_bias"
        elif base.endswith(modules) and (".mlp.experts." not in base or of.ndim == 3):
            stored = base
        yield stored, ("F32", np.ascontiguousarray(of, np.float32))


def _folder_of(case: Case, path: Path) -> tuple[dict[str, Any], Values]:
    """config.json and the tensors of a golden's folder."""
    stored = {
        tensor.name: np.asarray(reference.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in reference.GGUFReader(path).tensors
    }
    with Gguf(path) as file:
        found = {
            name: file.metadata.get(f"{file.architecture}.{key}", None)
            for name, key in case.keys.items()
        }
    said = {n: np.asarray(v).tolist() for n, v in found.items() if v is not None}
    said |= {"model_type": case.model_type, "tie_word_embeddings": False, **case.fields}
    return said, dict(_published(case.change(stored), case.names))


def _error(folder: Path, case: Case, reference_model: Any, data: Path) -> float:
    """How far the logits of a folder are from those of the golden, of their deviation."""
    with np.load(data / "families" / f"{case.golden}.npz") as golden:
        saved = dict(golden)
    with SafetensorsModel(folder) as model:
        logits = reference_model(model, Config.of(model), CONTEXT).logits(saved["tokens"])
    return relative_rms(logits, saved["logits"])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_llama_cpp_s(
    case: Case,
    reference_file: Callable[[str], Path],
    make_folder: Callable[..., Path],
    reference_model: Any,
    data: Path,
) -> None:
    folder = make_folder(*_folder_of(case, reference_file(case.golden)))
    assert _error(folder, case, reference_model, data) < case.tolerance


_M3 = published_names(
    **{f"ffn_{n}_shexp": f"block_sparse_moe.shared_experts.{n}_proj"
       for n in ("gate", "up", "down")},
    indexer="self_attn.indexer", experts="block_sparse_moe.experts",
    ffn_gate_inp="block_sparse_moe.gate", exp_probs_b="block_sparse_moe.e_score_correction_bias",
)  # fmt: skip


def _of_minimax_m3(name: str) -> str:
    """As MiniMax publishes it, whose names transformers changes as it loads."""
    stored = f"language_model.{_M3(name)}".replace("self_attn.indexer.", "self_attn.index_")
    if ".experts." in stored:
        for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            stored = stored.replace(ours, theirs)
    return stored


def _muse(values: Values) -> Values:
    """Without norms of heads, which the class has no weights of; two norms are as they are."""
    stored = {name: of for name, of in values.items() if "_q_norm." not in name}
    stored = {name: of for name, of in stored.items() if "_k_norm." not in name}
    less = less_one(half_style(stored, 4, 2))
    return less | {"output_norm.weight": values["output_norm.weight"]}


_HEADS = 2.5 * np.ones(32, np.float32)
#: Goldens with other keys and tensors than the class can have, and what it has in their place.
CHANGED = [
    pytest.param(
        Case("minimax-m3-moe", "minimax_m3_vl_text", _of_minimax_m3,
             lambda values: less_one(apart(values)),
             {**SIZES, **RMS, "num_experts_per_tok": "expert_used_count", "num_local_experts":
              "expert_count", "intermediate_size": "expert_feed_forward_length",
              "dense_intermediate_size": "feed_forward_length", "shared_intermediate_size":
              "expert_feed_forward_length"},
             {"hidden_act": "swigluoai", "moe_layer_freq": [0, 1], "rotary_dim": 32,
              "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.5, "swiglu_alpha": 1.702,
              "swiglu_limit": 7.0, "scoring_func": "sigmoid", "sparse_attention_config":
              {"sparse_attention_freq": [0, 1], "sparse_block_size": 4, "sparse_index_dim": 128,
               "sparse_topk_blocks": 32, "sparse_num_index_heads": 2, "sparse_local_block": 1}},
             TOLERANCE),
        {"expert_weights_norm": True, "expert_weights_scale": 1.5, "rope.dimension_count": 32,
         "attention.indexer.top_k": 32},
        {},
        id="minimax_m3_vl_text",
    ),
    pytest.param(
        Case("muse-glimmer-dense", "muse_glimmer_text", published_names(
            post_attention_norm="post_attention_layernorm", ffn_norm="pre_feedforward_layernorm",
            post_ffw_norm="post_feedforward_layernorm", attn_gate="self_attn.gate_proj"), _muse,
             {**SIZES, **RMS, "final_logit_softcapping": "final_logit_softcapping",
              "sliding_window": "attention.sliding_window"},
             {"layer_types": ["full_attention", "sliding_attention"], "qk_scale_factor": 2.5,
              "layer_rope_theta": [0, 10000.0], "post_norm_eps": 1e-8, "output_multiplier": 0.6},
             TOLERANCE),
        {"logit_scale": 0.6},
        {"attn_q_norm": _HEADS, "attn_k_norm": _HEADS / _HEADS},
        id="muse_glimmer_text",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "keys", "vectors"), CHANGED)
def test_logits_are_those_of_a_changed_golden(
    case: Case,
    keys: dict[str, Any],
    vectors: Values,
    reference_file: Callable[[str], Path],
    make_folder: Callable[..., Path],
    reference_model: Any,
    data: Path,
) -> None:
    """The file with the keys and tensors that the converter would write for such a folder."""
    path = reference_file(case.golden)
    with np.load(data / "families" / f"{case.golden}.npz") as golden:
        tokens = golden["tokens"]
    with Gguf(path) as file:
        plain = reference_model(file, Config.of(file), CONTEXT).logits(tokens)
        changed = {f"{file.architecture}.{key}": value for key, value in keys.items()}
        file.metadata = Metadata({**file.metadata, **changed})
        for name in [name for name in file.tensors if name.split(".")[-2] in vectors]:
            file.tensors[name] = vector(name, vectors[name.split(".")[-2]])
        wanted = reference_model(file, Config.of(file), CONTEXT).logits(tokens)
    with SafetensorsModel(make_folder(*_folder_of(case, path))) as model:
        logits = reference_model(model, Config.of(model), CONTEXT).logits(tokens)
    assert relative_rms(logits, wanted) < case.tolerance
    assert relative_rms(plain, wanted) > 0.01


#: EXAONE 3 as LG publishes it.
_EXAONE = published_names(
    "transformer.h", attn_norm="ln_1", ffn_norm="ln_2", ffn_gate="mlp.c_fc_0",
    ffn_up="mlp.c_fc_1", ffn_down="mlp.c_proj", token_embd="transformer.wte",
    output_norm="transformer.ln_f", attn_output="attn.attention.out_proj",
    **{f"attn_{n}": f"attn.attention.{n}_proj" for n in "qkv"},
)  # fmt: skip


def _exaone(names: Callable[[str], str], eps: str, layers: str, activation: str) -> Case:
    keys = {**SIZES, eps: "attention.layer_norm_rms_epsilon", layers: "block_count"}
    keys = {name: key for name, key in keys.items() if key != "block_count" or name == layers}
    return Case("exaone-dense", "exaone", names, dict, keys, {activation: "silu"}, TOLERANCE)


_GRANITE = Case("granite-dense", "granite_docling_text", published_names(), half_style, {
    **SIZES, **RMS, "embedding_multiplier": "embedding_scale", "residual_multiplier":
    "residual_scale", "logits_scaling": "logit_scale", "attention_multiplier": "attention.scale",
}, {}, TOLERANCE)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        _exaone(_EXAONE, "layer_norm_epsilon", "num_layers", "activation_function"),
        _exaone(published_names(), "rms_norm_eps", "num_hidden_layers", "hidden_act"),
        _GRANITE,
    ],
    ids=["exaone as published", "exaone by transformers", "granite_docling_text"],
)
def test_divisors_of_frequencies_are_said_as_those_of_longrope(
    case: Case,
    reference_file: Callable[[str], Path],
    make_folder: Callable[..., Path],
    reference_model: Any,
    data: Path,
) -> None:
    divisors: list[float] = []

    def change(values: Values) -> Values:
        divisors.extend(values.pop("rope_freqs.weight").tolist())
        return case.change(values)

    said, tensors = _folder_of(replace(case, change=change), reference_file(case.golden))
    factors = dict.fromkeys(("long_factor", "short_factor"), divisors)
    said["rope_scaling"] = {"rope_type": "longrope", "attention_factor": 1.0, **factors}
    said["original_max_position_embeddings"] = said["max_position_embeddings"]
    folder = make_folder(said, tensors)
    assert _error(folder, case, reference_model, data) < TOLERANCE


def test_gates_of_gemma3n_are_rare_by_the_deviation_of_all_values(
    reference_file: Callable[[str], Path],
    make_folder: Callable[..., Path],
    reference_model: Any,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In transformers; llama.cpp takes that of a sample, as which the golden's 768 gates count once
    the number of deviations makes up for it."""
    keys = {**SIZES, **RMS, "sliding_window": "attention.sliding_window",
            "rope_local_base_freq": "rope.freq_base_swa"}  # fmt: skip
    fields = {"num_kv_shared_layers": 2, "vocab_size": 128}
    case = Case("gemma3n-dense", "gemma3n_text", of_gemma3n, apart_altup, keys, fields, TOLERANCE)
    folder = make_folder(*_folder_of(case, reference_file(case.golden)))
    assert 1e-4 < _error(folder, case, reference_model, data) < 1e-3
    monkeypatch.setattr(gemma3n, "DEVIATIONS", gemma3n.DEVIATIONS * (768 / 767) ** 0.5)
    assert _error(folder, case, reference_model, data) < TOLERANCE


def test_deepseek_v4_has_experts_by_token_and_two_rotations(
    reference_file: Callable[[str], Path], make_folder: Callable[..., Path]
) -> None:
    (case,) = (param.values[0] for param in CASES if param.id == "deepseek_v4")
    said, tensors = _folder_of(case, reference_file(case.golden))
    table = np.random.default_rng(2).integers(0, 4, (128, 2))
    tensors["layers.0.ffn.gate.tid2eid"] = "I64", table
    del tensors["layers.0.ffn.gate.bias"]
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64}
    said |= {"num_hash_layers": 1, "rope_scaling": {**yarn, "beta_fast": 32, "beta_slow": 1}}
    with SafetensorsModel(make_folder(said, tensors)) as model:
        config = Config.of(model)
        routers = [layer.mixtures[0].router for layer in config.layers]
        assert [router.by_token is not None for router in routers] == [True, False, False, False]
        assert routers[0].by_token is not None
        stored = model.tensors[routers[0].by_token.name]
        np.testing.assert_array_equal(vector_values(routers[0].by_token, stored), table.ravel())
        plain, extended = config.ropes
        factors = vector_values(extended.factors, model.tensors[extended.factors.name])
        assert (plain.rotation.magnitude, extended.rotation.magnitude) == (1.0, 1.0)
        wanted = frequencies(32, 160000.0, RopeScaling.yarn(16.0, 64))[0]
        np.testing.assert_allclose(extended.frequencies(factors), wanted, rtol=1e-6)
        np.testing.assert_allclose(plain.frequencies(None), frequencies(32, 10000.0)[0])


def test_dots_note_of_its_class_is_that_of_published_folders(
    reference_file: Callable[[str], Path], make_folder: Callable[..., Path]
) -> None:
    """The class writes sizes of layers with a window, and bases of RoPE, by layer."""
    (case,) = (param.values[0] for param in CASES if param.id == "dots3_note")
    said, tensors = _folder_of(case, reference_file(case.golden))

    def described(fields: dict[str, Any]) -> Config:
        with SafetensorsModel(make_folder(fields, tensors)) as model:
            return Config.of(model)

    older = {name: value for name, value in said.items() if "swa_" in name}
    sizes = {name.removeprefix("swa_"): of for name, of in older.items() if "theta" not in name}
    newer = {name: value for name, value in said.items() if name not in older}
    del newer["use_dsa"], newer["apply_mla_qkv_lora_rescale"], newer["rope_theta"]
    sparse = "deepseek_sparse_attention"
    newer |= {"per_layer_config": {"1": sizes, "3": sizes}, "model_type": "dots3_note_text"}
    newer |= {"layer_types": 2 * [sparse, "sliding_attention"], "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
        for kind, base in ((sparse, said["rope_theta"]), ("sliding_attention", 5000.0))
    }}  # fmt: skip
    assert described(newer) == described(said)
    parts = ("vision_encoder.a", "model.audio_encoder.b", "mtp.embed_tokens", "layers.4.mlp.gate")
    rest = {f"model.{name.removeprefix('model.')}.weight": tensors["lm_head.weight"]
            for name in parts}  # fmt: skip
    beside = {"language_only": False, "im_token": "<a>", "audio_start_token": "<b>",
              "vision_config": {"embed_dim": 8}, "audio_config": {"d_model": 8},
              "num_nextn_predict_layers": 1, "rope_scaling": None}  # fmt: skip
    with SafetensorsModel(make_folder(said | beside, tensors | rest)) as model:
        assert set(rest) <= set(model.unused_tensors)
        assert Config.of(model) == described(said)
    for change, message in (
        ({"use_dsa": False}, "full attention without an indexer"),
        ({"swa_q_lora_rank": 32}, "'swa_q_lora_rank' is 32; 64 is supported"),
        ({"apply_mla_qkv_lora_rescale": False}, "'apply_mla_qkv_lora_rescale'"),
        ({"moe_shared_expert_intermediate_size": 64}, "96 is supported"),
        ({"attention_gate_type": "elementwise"}, "'attention_gate_type'"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "objects for deepseek_sparse_attention"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            described(said | change)
    with pytest.raises(UnsupportedError, match="equal layers"):
        described(newer | {"per_layer_config": {"1": sizes}})
    for odd, message in ((5, "'rope_parameters' is"), ({"rope_theta": 0}, "'swa_rope_theta' is 0")):
        with pytest.raises(ConfigError, match=message):
            described(said | {"rope_parameters": {"sliding_attention": odd}})
