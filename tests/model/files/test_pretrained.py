"""Folders as transformers writes them: names, values and types, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import ml_dtypes
import numpy as np
import pytest

from urdir.model.errors import (
    ConfigError,
    ModelError,
    SafetensorsError,
    SettingsError,
    UnsupportedError,
)
from urdir.model.files.metadata import Metadata
from urdir.model.files.pretrained.config import read_metadata
from urdir.model.files.pretrained.families import FAMILIES
from urdir.model.files.pretrained.model import SafetensorsModel
from urdir.model.files.pretrained.rows import RowBytes
from urdir.model.files.safetensors import StoredTensor, read_folder
from urdir.model.files.source import open_model

Folders = Callable[..., Path]
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FOLDERS = ("llama-bf16", "qwen2-f16-sharded", "qwen3moe-bf16")
_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def _array(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    return tensor.data[:].view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_are_those_of_the_gguf_package(model_type: str) -> None:
    family = FAMILIES[model_type]
    archs = {name: arch for arch, name in reference.MODEL_ARCH_NAMES.items()}
    known = reference.get_tensor_name_map(archs[family.architecture], 3)
    for ours, theirs in family.names.items():
        if family.tied and theirs == "output":
            continue
        name = ours.replace("{}", "2", 1).replace(".{}", "")  # experts are merged by then
        assert known.get_name(name) == theirs.format(2), ours


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_are_those_of_the_gguf_package(model_type: str) -> None:
    family = FAMILIES[model_type]
    known = {
        value
        for group in (reference.Keys.LLM, reference.Keys.Attention, reference.Keys.Rope)
        for name, value in vars(group).items()
        if isinstance(value, str) and not name.startswith("_")
    }
    for keys in family.keys.values():
        assert {f"{{arch}}.{key}" for key in keys} <= known


# ---- values ------------------------------------------------------------------------------------


def _turned(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head, the first and the second half taken in turns."""
    width = len(matrix) // heads
    rows = []
    for head in range(heads):
        for i in range(width // 2):
            rows += [matrix[head * width + i], matrix[head * width + width // 2 + i]]
    return np.stack(rows)


@pytest.mark.parametrize("name", FOLDERS)
def test_matrices_keep_their_values_and_types(data: Path, name: str) -> None:
    folder = data / "safetensors" / name
    stored = read_folder(folder)
    with SafetensorsModel(folder) as model:
        found = {
            "token_embd.weight": stored["model.embed_tokens.weight"],
            "blk.1.attn_v.weight": stored["model.layers.1.self_attn.v_proj.weight"],
            "blk.0.attn_output.weight": stored["model.layers.0.self_attn.o_proj.weight"],
        }
        for gguf_name, tensor in found.items():
            ours = model.tensors[gguf_name]
            assert (ours.shape, ours.type_name) == (tensor.shape, tensor.dtype)
            assert np.array_equal(ours.data[:], tensor.data[:])
        query = _array(stored["model.layers.1.self_attn.q_proj.weight"])
        if model.architecture == "llama":
            query = _turned(query, heads=2)
        assert bytes(model.tensors["blk.1.attn_q.weight"].data[:]) == query.tobytes()
        norm = model.tensors["blk.0.attn_norm.weight"]
        expected = _array(stored["model.layers.0.input_layernorm.weight"]).astype(np.float32)
        assert norm.type_name == "F32"
        assert np.array_equal(norm.data.view(np.float32), expected)


def test_experts_become_one_tensor(data: Path) -> None:
    folder = data / "safetensors" / "qwen3moe-bf16"
    stored = read_folder(folder)
    with SafetensorsModel(folder) as model:
        assert model.architecture == "qwen3moe"
        for ours, theirs in (("ffn_gate", "gate"), ("ffn_up", "up"), ("ffn_down", "down")):
            expected = np.stack(
                [
                    _array(stored[f"model.layers.1.mlp.experts.{i}.{theirs}_proj.weight"])
                    for i in range(4)
                ]
            )
            tensor = model.tensors[f"blk.1.{ours}_exps.weight"]
            assert (tensor.shape, tensor.type_name) == (expected.shape, "BF16")
            raw = expected.tobytes()
            assert len(tensor.data) == tensor.nbytes == len(raw)
            assert bytes(tensor.data[:]) == raw
            for begin, end in ((0, 1), (255, 257), (16383, 32770), (49151, 65536)):
                assert bytes(tensor.data[begin:end]) == raw[begin:end]
        router = model.tensors["blk.1.ffn_gate_inp.weight"]
        expected = _array(stored["model.layers.1.mlp.gate.weight"]).astype(np.float32)
        assert (router.shape, router.type_name) == ((4, 128), "F32")
        assert bytes(router.data[:]) == expected.tobytes()
        metadata = {key.partition(".")[2]: value for key, value in model.metadata.items()}
        expected_keys = {
            "block_count": 2, "context_length": 512, "embedding_length": 128,
            "feed_forward_length": 192, "attention.head_count": 2, "attention.head_count_kv": 1,
            "attention.key_length": 64, "attention.value_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64,
        }  # fmt: skip
        assert expected_keys.items() <= metadata.items()


def test_a_tied_matrix_is_left_out(data: Path, tmp_path: Path) -> None:
    folder = data / "safetensors" / "llama-bf16"
    assert "output.weight" in SafetensorsModel(folder).tensors
    assert "output.weight" not in SafetensorsModel(_changed(folder, tmp_path, TIE)).tensors
    assert "output.weight" not in SafetensorsModel(folder.with_name("qwen2-f16-sharded")).tensors


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "f32"])
def test_quantised_while_read(data: Path, kind: str) -> None:
    folder = data / "safetensors" / "qwen3moe-bf16"
    kept, model = SafetensorsModel(folder), open_model(folder, quantize=kind)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down_exps.weight"):
        values = np.frombuffer(bytes(kept.tensors[name].data[:]), ml_dtypes.bfloat16)
        values = values.astype(np.float32).reshape(kept.tensors[name].shape)
        expected = reference.quants.quantize(values, reference.GGMLQuantizationType[kind.upper()])
        tensor = model.tensors[name]
        assert tensor.type_name == kind.upper()
        raw = expected.tobytes()
        assert len(tensor.data) == tensor.nbytes == len(raw)
        assert bytes(tensor.data[:]) == raw
        assert bytes(tensor.data[7:1009]) == raw[7:1009]
    for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight"):
        assert model.tensors[name].type_name == "F32"
        assert bytes(model.tensors[name].data[:]) == bytes(kept.tensors[name].data[:])


def test_slices_of_bytes_that_are_made() -> None:
    whole = np.arange(7 * 5, dtype=np.uint8).reshape(7, 5)
    made: list[tuple[int, int]] = []

    def make(first: int, last: int) -> Any:
        made.append((first, last))
        return whole[first:last]

    rows = RowBytes(make, 7, 5, rows_at_once=2)
    for begin in range(36):
        for end in range(36):
            assert np.array_equal(rows[begin:end], whole.reshape(-1)[begin:end])
    assert max(last - first for first, last in made) == 2
    made.clear()
    assert len(rows[11:14]) == 3
    assert made == [(2, 3)]


# ---- small folders -----------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "vocab_size": 3,
    "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32", "_name_or_path": "x",
    "num_key_value_heads": 1,
}  # fmt: skip
TIE = {"tie_word_embeddings": True}


def _tensors(**shapes: tuple[int, ...]) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: ("F32", rng.standard_normal(s).astype(np.float32)) for name, s in named.items()}


def _changed(folder: Path, tmp_path: Path, fields: dict[str, Any]) -> Path:
    """A copy of a folder with other fields in its config.json."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | fields))
    return copy


def _metadata(**fields: Any) -> dict[str, Any]:
    config = {name: value for name, value in (CONFIG | fields).items() if value != "absent"}
    family = FAMILIES[config["model_type"]]
    return dict(read_metadata(config, family, Path("config.json")))


def test_gemma_norms_get_one_added(make_folder: Folders) -> None:
    tensors = _tensors(
        model__embed_tokens__weight=(3, 8),
        model__layers__0__input_layernorm__weight=(8,),
        model__layers__0__self_attn__q_norm__weight=(4,),
        model__layers__0__self_attn__q_proj__weight=(8, 8),
    )
    config = {k: v for k, v in CONFIG.items() if k != "hidden_act"} | {
        "model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 4,
        "head_dim": 4,
    }  # fmt: skip
    model = SafetensorsModel(make_folder(config, tensors))
    for theirs, ours in (("input_layernorm", "attn_norm"), ("self_attn.q_norm", "attn_q_norm")):
        expected = tensors[f"model.layers.0.{theirs}.weight"][1] + np.float32(1)
        values = model.tensors[f"blk.0.{ours}.weight"].data.view(np.float32)
        assert np.array_equal(values, expected)
    query = model.tensors["blk.0.attn_q.weight"]  # half-style RoPE: no row moves
    assert bytes(query.data[:]) == tensors["model.layers.0.self_attn.q_proj.weight"][1].tobytes()
    assert model.metadata["gemma3.attention.sliding_window"] == 16


def test_biases_of_q_and_k_move_with_their_rows(make_folder: Folders) -> None:
    tensors = _tensors(
        model__layers__0__self_attn__q_proj__bias=(8,),
        model__layers__0__self_attn__v_proj__bias=(4,),
    )
    model = SafetensorsModel(make_folder(CONFIG, tensors))
    for name, heads in (("q", 2), ("v", None)):
        bias = tensors[f"model.layers.0.self_attn.{name}_proj.bias"][1]
        expected = bias if heads is None else _turned(bias, heads)
        values = model.tensors[f"blk.0.attn_{name}.bias"].data.view(np.float32)
        assert np.array_equal(values, expected)


def test_odd_rows_keep_their_type(make_folder: Folders) -> None:
    tensors = _tensors(
        model__embed_tokens__weight=(3, 8),
        model__layers__0__mlp__down_proj__weight=(8, 32),
    )
    with pytest.warns(UserWarning, match=r"1 tensors keep .* q4_0's block: token_embd.weight"):
        model = SafetensorsModel(make_folder(CONFIG, tensors), "q4_0")
    assert model.tensors["token_embd.weight"].type_name == "F32"
    assert model.tensors["blk.0.ffn_down.weight"].type_name == "Q4_0"


# ---- metadata ----------------------------------------------------------------------------------


def test_a_llama_configuration() -> None:
    assert _metadata() == {
        "llama.block_count": 1, "llama.embedding_length": 8, "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
        "llama.context_length": 32, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model_type": "mistral", "sliding_window": 16, "head_dim": 6},
            {
                "context_length": 16,
                "attention.key_length": 6,
                "attention.value_length": 6,
                "rope.dimension_count": 6,
            },
        ),
        ({"model_type": "mistral", "sliding_window": None}, {"context_length": 32}),
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
            {"model_type": "starcoder2", "rms_norm_eps": "absent", "norm_epsilon": 1e-5,
             "hidden_act": "gelu_pytorch_tanh", "sliding_window": 20},
            {"attention.layer_norm_epsilon": 1e-5, "context_length": 20},
        ),
        (
            {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 16,
             "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 4,
             "num_hidden_layers": 2, "query_pre_attn_scalar": 4,
             "layer_types": ["sliding_attention", "full_attention"]},
            {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0,
             "final_logit_softcapping": 30.0},
        ),
        (
            {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e6,
             "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8}},
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.scaling.type": "linear",
             "rope.scaling.factor": 8.0},
        ),
        (
            {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "rope_theta": "absent",
             "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                                 "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
            {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 20,
             "original_max_position_embeddings": 32},
            {"rope.dimension_count": 2, "context_length": 20},
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 7,
             "rope_scaling": {"type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 16, "beta_fast": 16}},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
             "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 16.0},
        ),
        (
            {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1],
             "layer_types": ["full_attention"] * 5, "no_rope_layer_interval": 4},
            {"block_count": 5},
        ),
    ],
)  # fmt: skip
def test_what_families_add(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    arch = FAMILIES[fields["model_type"]].architecture
    assert {f"{arch}.{key}": value for key, value in expected.items()}.items() <= _metadata(
        **fields
    ).items()


def test_longrope_has_two_sets_of_factors() -> None:
    scaling = {"type": "longrope", "long_factor": [4.0, 8.0], "short_factor": [1.0, 1.5]}
    found = _metadata(model_type="phi3", rope_scaling=scaling, original_max_position_embeddings=8)
    assert list(found["rope_factors_long.weight"]) == [4.0, 8.0]
    assert list(found["rope_factors_short.weight"]) == [1.0, 1.5]
    assert found["phi3.rope.scaling.attn_factor"] == math.sqrt(1 + math.log(4) / math.log(8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: gptq is not"),
        ({"new_field": 3}, r"unknown field 'new_field' \(3\)"),
        ({"new\nfield": "\x1b[1m"}, r"unknown field ''new\\nfield'' \('\\x1b\[1m'\)"),
        ({"hidden_act": "relu"}, "'hidden_act' is 'relu'; 'silu' or 'swish' is supported"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' is 'True'; False is supported"),
        ({"sliding_window": 16}, "unknown field 'sliding_window'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "unknown field 'odd'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'factor' of YaRN is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": 3}, "'rope_scaling' is 3"),
        ({"rope_theta": "x"}, "'rope_theta' is x"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_attention_heads": True}, "'num_attention_heads' is True"),
        ({"hidden_size": "absent"}, "'hidden_size' is None"),
        ({"intermediate_size": "16"}, "'intermediate_size' is 16"),
        ({"rms_norm_eps": math.inf}, "'rms_norm_eps' is inf"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        (
            {"head_dim": 2**31 - 2, "rope_scaling": LLAMA3_SCALING},
            "'head_dim': 2,147,483,646 values of a head, at most 16,384 are supported",
        ),
        ({"hidden_size": 1 << 30, "rope_scaling": LLAMA3_SCALING}, "'hidden_size': 1,073,741,824"),
        ({"num_hidden_layers": 10**6}, "'num_hidden_layers': 1,000,000 layers, at most 512"),
        ({"num_attention_heads": 10**6}, "'num_attention_heads': 1,000,000 heads"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' differs from that of 'llama'"),
        ({"layer_types": []}, "'layer_types' differs from that of 'llama'"),
        ({"no_rope_layers": [1]}, "'no_rope_layers' differs from that of 'llama'"),
        (
            {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 1]},
            "'no_rope_layers' differs from that of 'smollm3'",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "'use_sliding_window' is 'True'"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, "'norm_topk_prob' is 'False'"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "'mlp_only_layers' is"),
        (
            {"model_type": "gemma2", "hidden_act": "absent", "query_pre_attn_scalar": 9},
            "'query_pre_attn_scalar' is 9; 'gemma2' has 4",
        ),
        (
            {"model_type": "cohere", "tie_word_embeddings": False, "rms_norm_eps": "absent"},
            "'tie_word_embeddings' is 'False'; True is supported",
        ),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        _metadata(**fields)


_ODD = (
    None, True, -1, 0, 3, 2**31, 2**63, 10**400, 0.5, -1e308, 1e308, math.nan, math.inf, "", "silu",
    [], [[]], ["full_attention"], [1], {}, {"a": []}, {"rope_type": []}, {"rope_type": "llama3"},
    {"factor": 10**400, "type": "yarn"}, {"rope_type": "longrope", "long_factor": [{}]},
    {"full_attention": 3}, {"full_attention": {}, "sliding_attention": []},
)  # fmt: skip
_SCALINGS = (
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8},
    {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0],
     "original_max_position_embeddings": 8},
)  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_odd_values_are_refused_or_read(model_type: str) -> None:
    """Whatever stands in a field: metadata, or an error that a user is told."""
    family = FAMILIES[model_type]
    names = {*CONFIG, *family.keys, *family.fixed, "rope_scaling", "rope_parameters", "layer_types"}
    names |= {"no_rope_layers", "query_pre_attn_scalar", "sliding_window", "partial_rotary_factor"}
    names |= {"original_max_position_embeddings", "quantization_config", "rope_local_base_freq"}
    base = {"model_type": model_type, "hidden_act": "absent"}
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
            _metadata(**{**base, **case, "model_type": model_type})
            outcomes.add("read")
        except (ConfigError, UnsupportedError):
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# ---- what does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "fields", "message"),
    [
        (
            {"model__odd__weight": (2,)},
            {},
            "tensor 'model.odd.weight' is not supported in a 'llama'",
        ),
        ({"model__layers__00__mlp__up_proj__weight": (2, 2)}, {}, "'model.layers.00.mlp"),
        ({"model__norm__scale": (2,)}, {}, "tensor 'model.norm.scale' is not supported"),
        ({"model__layers__0__self_attn__q_proj__weight": (6, 8)}, {}, "6 rows, not 2"),
        ({"model__embed_tokens__weight": (4, 8)}, {}, "'vocab_size' is 3, the embedding has 4"),
        ({"model__norm__weight": ()}, {}, "has 0 dimensions"),
        ({"model__norm__weight": (2, 2, 2)}, {}, "has 3 dimensions"),
        (
            {"model__norm__weight": (8,)},
            {"tie_word_embeddings": False},
            "tensor 'lm_head.weight' is missing",
        ),
        (
            {"model__layers__0__block_sparse_moe__experts__1__w1__weight": (2, 2)},
            {"model_type": "mixtral"},
            "expert 0 of 1 is missing",
        ),
        (
            {
                "model__layers__0__block_sparse_moe__experts__0__w1__weight": (2, 2),
                "model__layers__0__block_sparse_moe__experts__1__w1__weight": (2, 4),
            },
            {"model_type": "mixtral"},
            r"experts.1.w1.weight' is F32 \(2, 4\), .*experts.0.w1.weight' F32 \(2, 2\)",
        ),
        (
            {"model__norm__weight": (8,), "model__norm": (8,)},
            {},
            "tensors 'model.norm' and 'model.norm.weight' are the same",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    make_folder: Folders, shapes: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        SafetensorsModel(make_folder(CONFIG | fields, _tensors(**shapes)))


def test_a_dtype_that_is_not_converted(make_folder: Folders) -> None:
    folder = make_folder(CONFIG, {"model.norm.weight": ("F8_E4M3", np.zeros(8, np.uint8))})
    with pytest.raises(UnsupportedError, match=r"'model.norm.weight' has dtype F8_E4M3"):
        SafetensorsModel(folder)


def test_folders_that_are_none(tmp_path: Path, data: Path) -> None:
    with pytest.raises(SafetensorsError, match=r"no config\.json in this folder"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedError, match=r"model_type 't5' is not supported"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SafetensorsError, match=r"config\.json: the file is not JSON"):
        open_model(tmp_path)
    with pytest.raises(SettingsError, match=r"quantize applies to safetensors"):
        open_model(data / "golden" / "nano-llama-q8_0.gguf", quantize="q8_0")
    with pytest.raises(SettingsError, match=r"cannot quantise to 'q4_k'"):
        open_model(data / "safetensors" / "llama-bf16", quantize="q4_k")


def test_closed(data: Path) -> None:
    model = SafetensorsModel(data / "safetensors" / "llama-bf16")
    model.close()
    assert (model.tensors, model.metadata.keys() | set()) == ({}, set())
    assert isinstance(model.metadata, Metadata)
