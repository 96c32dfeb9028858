"""Folders as transformers would publish references of llama.cpp: names, fields, stored weights.

Rows that the converter permutes, transposed matrices, gates and ups in turns, experts apart or
stacked, one matrix for keys and values of latent attention, projections grouped by key head, and
vectors that the converter computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]
Values = dict[str, Array]
#: Above it the models' LongRoPE has its long factors, as in llama.cpp, see test_goldens.
CONTEXT = 512
TOLERANCE = 1e-5
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def published_names(layers: str = "model.layers", **changed: str) -> Callable[[str], str]:
    """The published name of a tensor, by common names and ``changed`` ones."""
    known = {**_ENDS, **_LAYER, **changed}

    def of(name: str) -> str:
        prefix, name = ("", name) if not name.startswith("blk.") else name[4:].split(".", 1)
        base, _, suffix = name.partition(".")
        published = known[base] + (f".{suffix}" if suffix else "")
        return f"{layers}.{prefix}.{published}" if prefix else published

    return of


def _halves(rows: Array, heads: int) -> Array:
    """Rows of each head with even numbers first: before the converter permutes them."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def half_style(values: Values, queries: int = 2, keys: int = 1) -> Values:
    heads = {"attn_q": queries, "attn_k": keys}
    return {
        name: _halves(of, heads[base]) if (base := name.split(".")[-2]) in heads else of
        for name, of in values.items()
    }


def _by_pairs(values: Values) -> Values:
    """Rows that rotate together are neighbours: before a converter of M-RoPE sorts them."""
    heads = {"attn_q": 2, "attn_k": 1}
    found = {}
    for name, of in values.items():
        count = heads.get(name.split(".")[-2], 0)
        rows = of.reshape(count, 2, -1, *of.shape[1:]) if count else of
        found[name] = rows.swapaxes(1, 2).reshape(of.shape) if count else of
    return found


def less_one(values: Values) -> Values:
    return {n: of - np.float32("_norm." in n and "ssm" not in n) for n, of in values.items()}


def _transposed(values: Values) -> Values:
    matrices = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return {n: of.T.copy() if n.endswith(matrices) else of for n, of in values.items()}


def _turns(values: Values) -> Values:
    """gpt-oss: gates and ups of an expert in turns, matrices (experts, in, out)."""
    found = {}
    for name, of in values.items():
        if "ffn_gate_exps" in name:
            ups = values[name.replace("gate", "up")]
            both = np.stack([of, ups], axis=2).reshape(len(of), -1, *of.shape[2:])
            is_matrix = name.endswith("weight")
            published = name.replace("ffn_gate_exps", "ffn_gate_up_exps")
            found[published] = both.swapaxes(1, 2).copy() if is_matrix else both
        elif name.endswith("ffn_down_exps.weight"):
            found[name] = of.swapaxes(1, 2).copy()
        elif "ffn_up_exps" not in name:
            found[name] = of
    return found


def apart(values: Values) -> Values:
    """A tensor for every expert."""
    found = {}
    for name, of in values.items():
        if "_exps." not in name:
            found[name] = of
            continue
        kind = name.split(".")[2].removeprefix("ffn_").removesuffix("_exps")
        for number, matrix in enumerate(of):
            found[f"{name.rpartition('.ffn_')[0]}.experts.{number}.{kind}_proj.weight"] = matrix
    return found


def _one_of_latent(values: Values) -> Values:
    """Keys and values of each head in one matrix."""
    found = {}
    for name, of in values.items():
        if "attn_k_b" in name:
            heads = values[name.replace("attn_k_b", "attn_v_b")]
            keys = of.reshape(len(heads) if heads.ndim == 3 else 1, *of.shape[-2:]).swapaxes(1, 2)
            both = np.concatenate([keys, heads.reshape(len(keys), -1, heads.shape[-1])], axis=1)
            found[name.replace("attn_k_b", "attn_kv_b")] = both.reshape(-1, both.shape[-1])
        elif "attn_v_b" not in name:
            found[name] = of
    return found


def _with_indexers(values: Values) -> Values:
    """Indexers' matrices by their published names."""
    names = {"attn_q_b": "wq_b", "attn_k": "wk", "proj": "weights_proj", "k_norm": "k_norm"}
    found = {}
    for name, of in values.items():
        head, mark, rest = name.partition(".indexer.")
        base, _, suffix = rest.partition(".")
        found[f"{head}{mark}{names[base]}.{suffix}" if mark else name] = of
    return found


_V4 = {
    "token_embd": "embed", "output_norm": "norm", "output": "head", "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "ffn_gate_inp": "ffn.gate", "exp_probs_b": "ffn.gate",
    "experts": "ffn.experts", "attn_q_a": "attn.wq_a", "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b", "attn_kv": "attn.wkv", "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a", "attn_output_b": "attn.wo_b", "attn_sinks": "attn.attn_sink",
    "indexer": "attn.indexer",
    **{f"ffn_{n}_shexp": f"ffn.shared_experts.{w}"
       for n, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))},
    **{f"{a}_compressor_{n}": f"{b}.compressor.{w}" for a, b in (("attn", "attn"),
       ("indexer", "attn.indexer")) for n, w in (("kv", "wkv"), ("gate", "wgate"), ("ape", "ape"),
       ("norm", "norm"))},
}  # fmt: skip


def _as_matrices(values: Values) -> Values:
    """Products of groups one below the other; without biases that nothing reads."""
    found = {name: of for name, of in values.items() if "_b_vl" not in name}
    return {
        name: of.reshape(-1, of.shape[-1]) if "attn_output_a" in name else of
        for name, of in found.items()
    }


def _of_deepseek_v4(name: str) -> str:
    """As DeepSeek publishes it, whose names transformers changes as it loads."""
    inner = name.removeprefix("blk.")
    prefix = "" if inner == name else f"layers.{inner.partition('.')[0]}."
    base, _, suffix = (inner.partition(".")[2] if prefix else name).partition(".")
    if base.startswith(("hc_", "output_hc_")):
        return prefix + base.replace("output_hc", "hc_head")
    named = f"{prefix}{_V4[base]}.{suffix}"
    if base == "attn_output_a":
        return named
    for stored, published in (("attn_q_b", "wq_b"), ("indexer.proj", "indexer.weights_proj"),
                              *((f"{n}_proj", w) for n, w in (("gate", "w1"), ("down", "w2"),
                                                              ("up", "w3")))):  # fmt: skip
        named = named.replace(stored, published)
    alone = base.endswith(("_ape", "attn_sinks"))
    return named.removesuffix(".weight") if alone else named


def _logs(values: Values) -> Values:
    return {n: np.log(-of) if n.endswith("ssm_a") else of for n, of in values.items()}


_GEMMA3N = published_names(
    post_attention_norm="post_attention_layernorm", ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm", inp_gate="per_layer_input_gate",
    proj="per_layer_projection", post_norm="post_per_layer_input_norm",
    altup_router="altup.modality_router", altup_router_norm="altup.router_norm",
    altup_predict_coef="altup.prediction_coefs", altup_correct_coef="altup.correction_coefs",
    altup_correct_scale="altup.correct_output_scale", laurel_l="laurel.linear_left",
    laurel_r="laurel.linear_right", laurel_post_norm="laurel.post_laurel_norm",
    altup_proj="model.altup_projections", altup_unembd_proj="model.altup_unembed_projections",
    per_layer_token_embd="model.embed_tokens_per_layer", per_layer_model_proj=
    "model.per_layer_model_projection", per_layer_proj_norm="model.per_layer_projection_norm",
)  # fmt: skip


def of_gemma3n(name: str) -> str:
    return _GEMMA3N(name).replace("model.", "model.language_model.", 1)


def apart_altup(values: Values) -> Values:
    """A matrix for every stream."""
    found = dict(values)
    for name in ("altup_proj", "altup_unembd_proj"):
        matrices = found.pop(f"{name}.weight")
        found |= {f"{name}.{number}.weight": of for number, of in enumerate(matrices)}
    return found


RMS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_NORM = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
SIZES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rope_theta": "rope.freq_base",
}  # fmt: skip
_WITHOUT_HEADS = {
    name: key for name, key in SIZES.items() if "head" not in name and "rope" not in name
}
_EXPERTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}


@dataclass(frozen=True)
class Case:
    """A golden as a folder of ``model_type``: names of tensors, how these are stored, and fields,
    by the key that has their value or with a value."""

    golden: str
    model_type: str
    names: Callable[[str], str]
    change: Callable[[Values], Values]
    keys: dict[str, str]
    fields: dict[str, Any]
    tolerance: float


def _case(
    golden: str,
    model_type: str,
    names: Callable[[str], str],
    change: Callable[[Values], Values],
    keys: dict[str, str] = RMS,
    tolerance: float = TOLERANCE,
    **fields: Any,
) -> Any:
    sizes = SIZES if "rms_norm_eps" in keys or model_type == "gpt2" else _WITHOUT_HEADS
    case = Case(golden, model_type, names, change, {**sizes, **keys}, fields, tolerance)
    return pytest.param(case, id=model_type)


def _by_key_head(values: Values) -> Values:
    """Qwen3-Next: queries, keys, values and gates of each of two key heads in one matrix."""
    found = dict(values)
    for name in [name for name in values if "ssm_ba" in name]:
        layer = name.rpartition(".ssm_ba")[0]
        qkv, gates = found.pop(f"{layer}.attn_qkv.weight"), found.pop(f"{layer}.attn_gate.weight")
        found.pop(f"{layer}.ssm_in.weight", None)
        width = (len(qkv) - len(gates)) // 2
        parts = (qkv[:width], qkv[width : 2 * width], qkv[2 * width :], gates)
        heads = [np.split(part, KEY_HEADS) for part in parts]
        found[f"{layer}.qkvz.weight"] = np.concatenate(
            [np.concatenate(of) for of in zip(*heads, strict=True)]
        )
    return less_one(_logs(_apart_of_both(found)))


def _apart_of_both(values: Values) -> Values:
    """Experts apart, gates and ups of which are one tensor."""
    found = {}
    for name, of in values.items():
        if "ffn_gate_up_exps" in name:
            for kind, half in zip(("gate", "up"), np.split(of, 2, axis=1), strict=True):
                found[name.replace("gate_up", kind)] = half
        else:
            found[name] = of
    return apart(found)


def _fused_gates(values: Values) -> Values:
    """HRM-Text: gates, queries, keys and values of a layer in one matrix, as it is published."""
    split = tuple(f"attn_{name}.weight" for name in ("gate", "q", "k", "v"))
    found = {name: of for name, of in values.items() if not name.endswith(split)}
    for name in [name for name in values if name.endswith("attn_gate.weight")]:
        parts = [values[name.replace("gate", of)] for of in ("gate", "q", "k", "v")]
        found[name.replace("attn_gate", "attn.gqkv")] = np.concatenate(parts)
    return found


def _hrm_names(name: str) -> str:
    """Of the second stack, layer 1 is the first one."""
    if not name.startswith("blk."):
        return {"hrm.z_l_init": "model.z_L_init"}.get(name) or published_names()(name)
    stack = "LH"[int(name[4])]
    base, _, suffix = name[6:].rpartition(".")
    known = {**_LAYER, "attn_gate": "self_attn.gate_proj", "attn.gqkv": "attn.gqkv_proj"}
    return f"model.{stack}_module.layers.0.{known[base]}.{suffix}"


_HRM = {**RMS, "num_layers_per_stack": "hrm.layers_per_stack", "H_cycles": "hrm.h_cycles",
        "L_cycles": "hrm.l_cycles"}  # fmt: skip
KEY_HEADS = 2
_NEXT = {
    "ssm_out": "linear_attn.out_proj", "ssm_norm": "linear_attn.norm", "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d", "ssm_ba":
    "linear_attn.in_proj_ba", "qkvz": "linear_attn.in_proj_qkvz", "experts": "mlp.experts",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "post_attention_norm":
    "post_attention_layernorm",
    **{f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
}  # fmt: skip


def _sparse(values: Values) -> Values:
    """Latent attention with an indexer, experts apart."""
    return apart(_one_of_latent(_with_indexers(values)))


_SPARSE_MODULES = dict(
    **{f"attn_{n}": f"self_attn.{n}_proj" for n in ("q_a", "q_b", "kv_b")},
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_q_a_norm="self_attn.q_a_layernorm",
    attn_kv_a_norm="self_attn.kv_a_layernorm",
    experts="mlp.experts",
    exp_probs_b="mlp.gate.e_score_correction_bias",
    indexer="self_attn.indexer",
    **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
)
_SPARSE = published_names(**_SPARSE_MODULES)
_SPARSE_KEYS = {
    **RMS,
    **_EXPERTS,
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "norm_topk_prob": "expert_weights_norm",
    "qk_rope_head_dim": "rope.dimension_count",
    "routed_scaling_factor": "expert_weights_scale",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}


def _last_halves(values: Values) -> Values:
    """Hunyuan 4: the last 32 values of heads rotate by halves."""

    def turned(of: Array) -> Array:
        return np.concatenate([of[:, :-32], of[:, -32::2], of[:, -31::2]], axis=1)

    heads = {"attn_q_b": 2, "attn_kv_a_mqa": 1, "indexer.attn_q_b": 16, "indexer.attn_k": 1}
    heads["indexer.k_norm"] = 1
    found = {}
    for name, of in values.items():
        base = name.split(".", 2)[-1].rpartition(".")[0]
        count = heads.get(base, 0)
        found[name] = (
            turned(of.reshape(count, -1, *of.shape[1:])).reshape(of.shape) if count else of
        )
    return _sparse(found)


def _beside_pictures(values: Values) -> Values:
    """ERNIE 4.5 VL: experts of pictures, which are narrower, follow those of text. The network
    beside them is as wide as these: padded."""
    random = np.random.default_rng(4)
    found = {}
    for name, of in apart(values).items():
        of = of.T.copy() if name.endswith("ffn_gate_inp.weight") else of
        if "_shexp" in name:
            of = np.pad(of, ((0, 0), (0, 96)) if "ffn_down" in name else ((0, 96), (0, 0)))
        if "exp_probs_b" in name:
            of = np.stack([of, random.standard_normal(of.shape)])
        found[name] = of
        if ".experts." in name:
            base, _, rest = name.partition(".experts.")
            number, _, kind = rest.partition(".")
            other = of[:, :40] if kind.startswith("down") else of[:40]
            found[f"{base}.experts.{int(number) + 4}.{kind}"] = other + 1
        if "ffn_gate_inp" in name:
            found[name.replace("ffn_gate_inp.weight", "ffn_gate_inp.weight_1")] = of + 1
    return found


def _neighbours(values: Values) -> Values:
    """dots.note 3: the first 32 values of heads of indexers rotate as neighbours, and latent
    vectors are scaled after their norms."""

    def turned(of: Array) -> Array:
        pairs = of[:, :32].reshape(len(of), 2, 16, *of.shape[2:]).swapaxes(1, 2)
        return np.concatenate([pairs.reshape(of[:, :32].shape), of[:, 32:]], axis=1)

    found = {}
    for name, of in values.items():
        if "indexer." in name and "proj" not in name:
            heads = 16 if "attn_q_b" in name else 1
            of = turned(of.reshape(heads, -1, *of.shape[1:])).reshape(of.shape)
        elif name.endswith("_a_norm.weight"):
            of = of / np.float32((128 / len(of)) ** 0.5)
        found[name] = of
    return _sparse(found)


_GLM5 = published_names(
    **{f"attn_{n}": f"self_attn.{n}_proj" for n in ("q_a", "q_b", "kv_b")},
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa", attn_q_a_norm="self_attn.q_a_layernorm",
    attn_kv_a_norm="self_attn.kv_a_layernorm", experts="mlp.experts",
    exp_probs_b="mlp.gate.e_score_correction_bias", indexer="self_attn.indexer",
    indexer_compressor_ape="self_attn.indexer.index_kpool_compress_ape",
    indexer_compressor_gate="self_attn.indexer.index_kpool_compress_gate",
    **{f"ssm_{a}_{b}": f"self_attn.{a}_{b}_proj" for a in "fg" for b in "ab"},
    **{f"ssm_conv1d_{n}": f"self_attn.{n}_conv1d" for n in "qkv"},
    ssm_a="self_attn.A_log", ssm_beta="self_attn.b_proj", ssm_norm="self_attn.o_norm",
    ssm_dt="self_attn.dt_bias",
    **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
    **{f"hc_{a}_{b}": f"hc_{a}_{b}" for a in ("attn", "ffn") for b in ("fn", "base", "scale")},
)  # fmt: skip


def _of_glm5(name: str) -> str:
    """As Zhipu publishes it, whose names transformers changes as it loads."""
    found = _GLM5(name).replace("model.", "model.language_model.", 1)
    alone = ("compress_ape.weight", "compress_gate.weight", "dt_bias.bias")
    return found.rpartition(".")[0] if found.endswith(alone) else found


CASES = [
    _case("glm5-next", "glm5_next_text", _of_glm5,
        lambda values: apart(_logs(_one_of_latent(_with_indexers(values)))),
        {**{name: key for name, key in _SPARSE_KEYS.items() if name != "num_experts"},
         "n_routed_experts": "expert_count", "qk_nope_head_dim": "attention.key_length_mla",
         "index_kpool": "attention.indexer.kpool", "hc_mult": "hyper_connection.count",
         "hc_eps": "hyper_connection.epsilon",
         "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations"},
        num_key_value_heads=2, head_dim=0, qk_rope_head_dim=0, swiglu_limit=1e6,
        layer_types=["full_attention", "linear_attention"] * 2, rope_theta=None,
        linear_attn_config={"head_dim": 64, "num_heads": 2, "short_conv_kernel_size": 4,
                            "gate_lower_bound": -5.0, "safe_gate": True},
        tolerance=3e-5),
    _case("dots3note", "dots3_note", published_names(
        **_SPARSE_MODULES, attn_gate="self_attn.g_proj",
        attn_k_norm="self_attn.k_rope_only_layernorm"),
        _neighbours, {**_SPARSE_KEYS, "swa_rope_theta": "rope.freq_base_swa"},
        swa_kv_lora_rank=32, swa_q_lora_rank=64, swa_qk_nope_head_dim=32,
        swa_qk_rope_head_dim=32, swa_head_dim=64, swa_v_head_dim=32, swa_num_attention_heads=2,
        swa_num_key_value_heads=2, apply_mla_qkv_lora_rescale=True, qk_nope_head_dim=64,
        layer_types=2 * ["full_attention", "sliding_attention"], use_dsa=True,
        moe_shared_expert_intermediate_size=96, sliding_window_size=20),
    _case("hy_v4", "hy_v4", published_names(
        **_SPARSE_MODULES, attn_gate="self_attn.linear_gate", attn_sinks="self_attn.sinks",
        **{f"hc_attn_{n}": f"attn_hc.{n}" for n in ("fn", "base", "scale")},
        **{f"hc_ffn_{n}": f"hc_pre.hc_mlp_layer.hc_{n}" for n in ("fn", "base", "scale")},
        **{f"output_hc_{n}": f"model.hc_head.hc_head_{n}" for n in ("fn", "base", "scale")}),
        _last_halves,
        {**_SPARSE_KEYS, "hc_magnitude": "hyper_connection.magnitude"},
        qk_nope_head_dim=64, indexer_types=["full", "shared", "full"],
        tolerance=3e-5),
    _case("hy_v4", "hy_v4_vl_text", published_names(
        **{**_SPARSE_MODULES, "ffn_gate_shexp": "mlp.shared_experts.linear_gate"},
        attn_gate="self_attn.linear_gate", attn_sinks="self_attn.sinks",
        **{f"hc_attn_{n}": f"hc_pre.hc_attn_layer.hc_{n}" for n in ("fn", "base", "scale")},
        **{f"hc_ffn_{n}": f"hc_pre.hc_mlp_layer.hc_{n}" for n in ("fn", "base", "scale")},
        **{f"output_hc_{n}": f"model.hc_head.hc_pre.hc_head_{n}" for n in ("fn", "base", "scale")}),
        _sparse, {**_SPARSE_KEYS, "hc_magnitude": "hyper_connection.magnitude"},
        qk_nope_head_dim=64, indexer_types=["full", "shared", "full"]),
    *(_case("glm4-dense", name, published_names(
        post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
        _by_pairs) for name in ("glm4v_text", "glm_ocr_text")),
    _case("glm4moe-moe", "glm4v_moe_text", published_names(
        post_attention_norm="post_attention_layernorm", experts="mlp.experts",
        exp_probs_b="mlp.gate.e_score_correction_bias",
        **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}),
        apart, {**RMS, **_EXPERTS, **{name: _SPARSE_KEYS[name] for name in (
            "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace",
            "norm_topk_prob", "routed_scaling_factor")}}, partial_rotary_factor=1.0),
    _case("ernie4_5-moe-moe", "ernie4_5_vl_moe_text", published_names(
        experts="mlp.experts", exp_probs_b="mlp.moe_statics.e_score_correction_bias",
        **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}),
        _beside_pictures, {**RMS, "moe_num_experts": "expert_count",
                           "moe_k": "expert_used_count"}, moe_intermediate_size=[192, 40],
        moe_num_shared_experts=1, mlp_layer_types=["dense", "sparse"]),
    # DeepSeek 1 computes the same
    _case("deepseek-moe", "deepseek_ocr2_text", published_names(
        experts="mlp.experts",
        **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}),
        lambda values: apart(half_style(values)),
        {**RMS, "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         **{name: _SPARSE_KEYS[name] for name in ("n_shared_experts", "moe_intermediate_size",
            "first_k_dense_replace", "routed_scaling_factor")}}),
    _case("qwen2vl-dense", "qwen2_5_omni_text", published_names(), lambda values: values),
    _case("qwen3moe-moe", "qwen3_omni_moe_text", published_names(experts="mlp.experts"), apart,
          {**RMS, **_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}),
    _case("step35-moe", "step3p5", published_names(
        attn_gate="self_attn.g_proj", ffn_gate_inp="moe.gate", exp_probs_b="moe.router_bias",
        **{f"ffn_{n}_exps": f"moe.{n}_proj" for n in ("gate", "up", "down")},
        **{f"ffn_{n}_shexp": f"share_expert.{n}_proj" for n in ("gate", "up", "down")}),
        less_one,
        {**RMS, **_EXPERTS, "sliding_window": "attention.sliding_window",
         "moe_intermediate_size": "expert_feed_forward_length",
         "share_expert_dim": "expert_shared_feed_forward_length",
         "moe_router_scaling_factor": "expert_weights_scale",
         "swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"},
        layer_types=[*("full_attention", "sliding_attention", "sliding_attention"),
                     *("full_attention", "sliding_attention")],
        rope_theta=[1e4, 5e3, 5e3, 1e4, 5e3], partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 1.0]),
    _case("hrm_text-dense", "hrm_text", _hrm_names, lambda values: values, _HRM,
          embedding_scale=1.0, L_bp_cycles=[2]),
    _case("hrm_text-dense", "hrm_text", _hrm_names, _fused_gates, _HRM, initializer_range=1.0),
    _case("bitnet-dense", "bitnet", published_names(
        attn_sub_norm="self_attn.attn_sub_norm", ffn_sub_norm="mlp.ffn_sub_norm"),
        lambda values: values, hidden_act="silu", tie_word_embeddings=True),
    _case("smollm3-dense", "smollm3", published_names(), half_style),
    _case("qwen3moe-moe", "qwen3_moe", published_names(experts="mlp.experts"), apart,
          {**RMS, **_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"}),
    _case("gemma3-dense", "gemma3_text", published_names(
        post_attention_norm="post_attention_layernorm", ffn_norm="pre_feedforward_layernorm",
        post_ffw_norm="post_feedforward_layernorm"), less_one,
        {**RMS, "sliding_window": "attention.sliding_window", "query_pre_attn_scalar":
         "attention.key_length", "rope_local_base_freq": "rope.freq_base_swa"},
        sliding_window_pattern=2),
    _case("gpt2-dense", "gpt2", published_names(
          "h", attn_norm="ln_1", ffn_norm="ln_2", token_embd="wte",
          attn_qkv="attn.c_attn", attn_output="attn.c_proj", ffn_up="mlp.c_fc",
          ffn_down="mlp.c_proj", output_norm="ln_f", position_embd="wpe"), _transposed, _NORM),
    _case("gpt-oss-moe", "gpt_oss", published_names(
        post_attention_norm="post_attention_layernorm", ffn_gate_inp="mlp.router",
        ffn_gate_up_exps="mlp.experts.gate_up_proj", ffn_down_exps="mlp.experts.down_proj",
        attn_sinks="self_attn.sinks"), _turns,
        {**RMS, **_EXPERTS, "intermediate_size": "expert_feed_forward_length",
         "sliding_window": "attention.sliding_window"}),
    _case("mamba-dense", "mamba", published_names(
        "backbone.layers", attn_norm="norm", output_norm="backbone.norm_f",
        token_embd="backbone.embeddings", ssm_a="mixer.A_log", ssm_d="mixer.D",
        **{f"ssm_{n}": f"mixer.{n}_proj" for n in ("in", "x", "dt", "out")},
        ssm_conv1d="mixer.conv1d"), _logs,
        {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon", "state_size": "ssm.state_size",
         "conv_kernel": "ssm.conv_kernel", "time_step_rank": "ssm.time_step_rank",
         "intermediate_size": "ssm.inner_size"}),
    _case("deepseek2-moe", "deepseek_v3", published_names(
        **{f"attn_{n}": f"self_attn.{n}_proj" for n in ("q_a", "q_b", "kv_b")},
        attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa", attn_q_a_norm="self_attn.q_a_layernorm",
        attn_kv_a_norm="self_attn.kv_a_layernorm", experts="mlp.experts", exp_probs_b=
        "mlp.gate.e_score_correction_bias",
        **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}),
        lambda values: _apart_of_both(_one_of_latent(values)),
        {**RMS, **_EXPERTS, "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank":
         "attention.q_lora_rank", "v_head_dim": "attention.value_length_mla", "n_shared_experts":
         "expert_shared_count", "moe_intermediate_size": "expert_feed_forward_length",
         "first_k_dense_replace": "leading_dense_block_count", "norm_topk_prob":
         "expert_weights_norm", "qk_rope_head_dim": "rope.dimension_count"},
        qk_nope_head_dim=128,
        tolerance=3e-5),  # transformers norms latent vectors with another eps than llama.cpp
    _case("deepseek32", "deepseek_v32", _SPARSE, _sparse, _SPARSE_KEYS, qk_nope_head_dim=64,
          tolerance=3e-5),  # other eps of latent vectors and of index keys
    _case("glm-dsa-shared", "glm_moe_dsa", _SPARSE, _sparse, _SPARSE_KEYS, qk_nope_head_dim=64,
          indexer_types=["full", "shared", "full"], layer_types=3 * ["indexed_attention"],
          tolerance=3e-5),
    _case("deepseek4", "deepseek_v4", _of_deepseek_v4,
          lambda values: apart(_as_matrices(values)),
          {**RMS, "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
           "q_lora_rank": "attention.q_lora_rank", "n_shared_experts": "expert_shared_count",
           "moe_intermediate_size": "expert_feed_forward_length", "norm_topk_prob":
           "expert_weights_norm", "routed_scaling_factor": "expert_weights_scale",
           "qk_rope_head_dim": "rope.dimension_count", "index_n_heads":
           "attention.indexer.head_count", "index_head_dim": "attention.indexer.key_length",
           "index_topk": "attention.indexer.top_k", "compress_ratios":
           "attention.compress_ratios", "compress_rope_theta": "attention.compress_rope_freq_base",
           "sliding_window": "attention.sliding_window", "o_groups":
           "attention.output_group_count", "o_lora_rank": "attention.output_lora_rank",
           "hc_mult": "hyper_connection.count", "hc_sinkhorn_iters":
           "hyper_connection.sinkhorn_iterations", "hc_eps": "hyper_connection.epsilon",
           "swiglu_limit": "swiglu_clamp_exp", "num_hash_layers": "hash_layer_count"},
          scoring_func="sqrtsoftplus"),
    _case("qwen3next-moe", "qwen3_next", published_names(**_NEXT), _by_key_head,
          {**RMS, **_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length",
           "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
           "linear_key_head_dim": "ssm.state_size", "linear_value_head_dim": "ssm.state_size",
           "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads":
           "ssm.time_step_rank", "linear_conv_kernel_dim": "ssm.conv_kernel"},
          full_attention_interval=2, partial_rotary_factor=1.0),
]  # fmt: skip
