"""Shapes of published models: sizes from config.json, and the optional tensors of their files.

A shape is data: the keys that the architecture's family reads, without the architecture's name, and
the tensors by which the family recognises optional parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a published model.

    ``keys`` are metadata of the architecture; missing keys of `Shape.metadata` follow from the
    sizes. ``layer`` are optional tensors of every layer, ``tensors`` others. ``kind`` is the weight
    type in which the model is usually published. ``nextn`` heads for predicting several tokens
    (MTP) follow the ``layers``.
    """

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    keys: Mapping[str, Any] = field(default_factory=dict)
    layer: tuple[str, ...] = ("ffn_gate.weight",)
    tensors: tuple[str, ...] = ()
    kind: str = "q4_k_m"
    nextn: int = 0

    @property
    def experts(self) -> int:
        """Experts per layer; 0: none."""
        return int(self.keys.get("expert_count", 0))

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata of a file of a model with that ``name``."""
        keys = {
            "block_count": self.layers + self.nextn,
            "nextn_predict_layers": self.nextn or None,
            "context_length": 131072,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head_dim,
            **self.keys,
        }
        general = {"general.architecture": self.arch, "general.name": name}
        present = {key: value for key, value in keys.items() if value is not None}
        return general | {f"{self.arch}.{key}": value for key, value in present.items()}

    def stored(self) -> dict[str, tuple[int, ...]]:
        """The tensors by which a family recognises optional parts."""
        table = (self.vocab, self.hidden)
        found: dict[str, tuple[int, ...]] = {"token_embd.weight": table}
        if not self.tied:
            found["output.weight"] = table
        found |= dict.fromkeys(self.tensors, ())
        blocks = range(self.layers + self.nextn)
        return found | {f"blk.{i}.{name}": () for i in blocks for name in self.layer}


def _turns(base: float) -> dict[str, Any]:
    return {"rope.freq_base": base}


#: The key of LLaMA's norm epsilon, for families with LayerNorm.
_LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_QWEN2 = ("ffn_gate.weight", *_QKV_BIAS)
_QWEN3 = ("ffn_gate.weight", *_HEAD_NORMS)
_SMALL_EPS = {"attention.layer_norm_rms_epsilon": 1e-6}
#: Windows and RoPE of Gemma 3: https://huggingface.co/google/gemma-3-27b-it
_GEMMA3 = {
    "attention.sliding_window": 1024,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
    **_SMALL_EPS,
}

#: Linear attention of Qwen3-Next and Qwen 3.5: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct
_DELTA = {
    **_turns(1e7),
    **_SMALL_EPS,
    "context_length": 262144,
    "rope.dimension_count": 64,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 32,
    "ssm.group_count": 16,
}
_QWEN35 = {**_DELTA, "rope.dimension_sections": np.array([11, 11, 10, 0])}


def _of_layers(count: int, places: Sequence[int], value: int) -> npt.NDArray[np.int32]:
    """One number per layer: ``value`` at some ``places``, else 0."""
    numbers = np.zeros(count, np.int32)
    numbers[list(places)] = value
    return numbers


#: BERT's keys, and the optional tensors of its layers.
_BERT = {**_LAYER_NORM, "attention.causal": False, "context_length": 512, "pooling_type": 2}
_BERT_LAYER = (
    *_QKV_BIAS,
    "attn_output.bias",
    "attn_output_norm.bias",
    "ffn_up.bias",
    "ffn_down.bias",
    "layer_output_norm.bias",
)
_BERT_TENSORS = ("position_embd.weight", "token_types.weight", "token_embd_norm.bias")
#: https://huggingface.co/answerdotai/ModernBERT-large
_MODERN_BERT = {
    **_LAYER_NORM,
    "attention.causal": False,
    "attention.sliding_window": 128,
    "context_length": 8192,
    "rope.freq_base": 160000.0,
    "rope.freq_base_swa": 10000.0,
    "pooling_type": 2,
}

#: Layers of https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K: Mamba-2, FFN, attention.
_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _gpt_oss(layers: int, experts: int) -> Shape:
    return Shape(
        *("gpt-oss", layers, 2880, 64, 8, 64, 2880, 201088, False),
        {
            **_turns(150000.0),
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "expert_count": experts,
            "expert_used_count": 4,
            "expert_feed_forward_length": 2880,
        },
        (*_QKV_BIAS, "attn_output.bias"),
        kind="mxfp4_moe",
    )


SHAPES = {
    "llama-3.2-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, True, _turns(5e5)),
    "llama-3.2-3b": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256, True, _turns(5e5)),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, False, _turns(5e5)),
    "llama-3.1-70b": Shape("llama", 80, 8192, 64, 8, 128, 28672, 128256, False, _turns(5e5)),
    "bert-base": Shape(
        *("bert", 12, 768, 12, 12, 64, 3072, 30522, True), _BERT, _BERT_LAYER, _BERT_TENSORS, "f16"
    ),
    "bge-large": Shape(
        *("bert", 24, 1024, 16, 16, 64, 4096, 30522, True), _BERT, _BERT_LAYER, _BERT_TENSORS, "f16"
    ),
    "modernbert-large": Shape(
        *("modern-bert", 28, 1024, 16, 16, 64, 2624, 50368, True), _MODERN_BERT, (), (), "f16"
    ),
    "mistral-small-24b": Shape(
        *("llama", 40, 5120, 32, 8, 128, 32768, 131072, False),
        {**_turns(1e8), "context_length": 32768},
    ),
    "mixtral-8x7b": Shape(
        *("llama", 32, 4096, 32, 8, 128, 14336, 32000, False),
        {**_turns(1e6), "context_length": 32768, "expert_count": 8, "expert_used_count": 2},
        layer=("ffn_gate_exps.weight",),
    ),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True, _turns(1e6), _QWEN2),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True, _turns(1e6), _QWEN2),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False, _turns(1e6), _QWEN2),
    "qwen2.5-32b": Shape(
        *("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
        {**_turns(1e6), **_SMALL_EPS, "context_length": 32768},
        _QWEN2,
    ),
    "qwen3-0.6b": Shape(
        *("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True),
        {**_turns(1e6), **_SMALL_EPS, "context_length": 40960},
        _QWEN3,
    ),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, _turns(1e6), _QWEN3),
    "qwen3-30b-a3b": Shape(
        *("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, False),
        {
            **_turns(1e6),
            **_SMALL_EPS,
            "context_length": 40960,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_feed_forward_length": 768,
        },
        _HEAD_NORMS,
    ),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "gemma-2-9b": Shape(
        *("gemma2", 42, 3584, 16, 8, 256, 14336, 256000, True),
        {
            **_turns(10000.0),
            **_SMALL_EPS,
            "context_length": 8192,
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma-3-4b": Shape("gemma3", 34, 2560, 8, 4, 256, 10240, 262208, True, _GEMMA3),
    "gemma-3-27b": Shape("gemma3", 62, 5376, 32, 16, 128, 21504, 262208, True, _GEMMA3),
    "gemma-4-e4b": Shape(
        *("gemma4", 42, 2560, 8, 2, 512, 10240, 262144, True),
        {
            **_turns(1e6),
            **_SMALL_EPS,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "attention.sliding_window": 512,
            "attention.sliding_window_pattern": np.array(([1] * 5 + [0]) * 7, np.bool_),
            "attention.shared_kv_layers": 18,
            "rope.dimension_count_swa": 256,
            "rope.freq_base_swa": 10000.0,
            "embedding_length_per_layer_input": 256,
            "final_logit_softcapping": 30.0,
        },
        ("ffn_gate.weight", "attn_v.weight", "layer_output_scale.weight"),
        ("rope_freqs.weight",),
    ),
    "phi-4": Shape(
        *("phi3", 40, 5120, 40, 10, 128, 17920, 100352, False),
        {**_turns(250000.0), "context_length": 16384},
        ("attn_qkv.weight",),
    ),
    "granite-3.3-8b": Shape(
        *("granite", 40, 4096, 32, 8, 128, 12800, 49159, True),
        {
            **_turns(1e7),
            "embedding_scale": 12.0,
            "attention.scale": 0.0078125,
            "residual_scale": 0.22,
            "logit_scale": 16.0,
        },
    ),
    "olmo-2-7b": Shape(
        *("olmo2", 32, 4096, 32, 32, 128, 11008, 100352, False),
        {**_turns(5e5), **_SMALL_EPS, "context_length": 4096},
    ),
    "glm-4-9b": Shape(
        *("chatglm", 40, 4096, 32, 2, 128, 13696, 151552, False),
        {
            **_turns(5e6),
            "rope.dimension_count": 64,
            "attention.layer_norm_rms_epsilon": 1.5625e-7,
        },
        ("attn_qkv.weight", "attn_qkv.bias"),
    ),
    "glm-4.5-air": Shape(
        *("glm4moe", 46, 4096, 96, 8, 128, 10944, 151552, False),
        {
            **_turns(1e6),
            "rope.dimension_count": 64,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_shared_count": 1,
            "expert_feed_forward_length": 1408,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
        },
        (*_QKV_BIAS, "exp_probs_b.bias"),
        ("blk.46.nextn.embed_tokens.weight", "blk.46.nextn.shared_head_head.weight"),
        nextn=1,
    ),
    "command-r7b": Shape(
        *("cohere2", 32, 4096, 32, 8, 128, 14336, 256000, True),
        {
            **_turns(50000.0),
            **_LAYER_NORM,
            "context_length": 8192,
            "attention.sliding_window": 4096,
            "logit_scale": 0.25,
        },
    ),
    "smollm3-3b": Shape(
        *("smollm3", 36, 2048, 16, 4, 128, 11008, 128256, True),
        {**_turns(5e6), **_SMALL_EPS, "context_length": 65536},
    ),
    "starcoder2-7b": Shape(
        *("starcoder2", 32, 4608, 36, 4, 128, 18432, 49152, True),
        {**_turns(1e6), **_LAYER_NORM, "context_length": 16384},
        _QKV_BIAS,
    ),
    "falcon-7b": Shape(
        *("falcon", 32, 4544, 71, 1, 64, 18176, 65024, False),
        {**_turns(10000.0), **_LAYER_NORM, "context_length": 2048},
        ("attn_qkv.weight",),
    ),
    "gpt2-xl": Shape(
        *("gpt2", 48, 1600, 25, 25, 64, 6400, 50257, True),
        {**_LAYER_NORM, "context_length": 1024, "rope.dimension_count": None},
        ("attn_qkv.weight",),
    ),
    "qwen3-next-80b-a3b": Shape(
        *("qwen3next", 48, 2048, 16, 2, 256, 5120, 151936, False),
        {
            **_DELTA,
            "expert_count": 512,
            "expert_used_count": 10,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
        ("ffn_gate_shexp.weight",),
    ),
    "qwen3.5-35b-a3b": Shape(
        *("qwen35moe", 40, 2048, 16, 2, 256, 5120, 248320, False),
        {
            **_QWEN35,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
        ("ffn_gate_shexp.weight",),
        nextn=1,
    ),
    "qwen3.5-4b": Shape("qwen35", 32, 2560, 16, 4, 256, 9216, 248320, True, _QWEN35, nextn=1),
    "lfm2-8b-a1b": Shape(
        *("lfm2moe", 24, 2048, 32, 8, 64, 7168, 65536, True),
        {
            **_turns(1e6),
            "context_length": 128000,
            "shortconv.l_cache": 3,
            "attention.head_count_kv": _of_layers(24, (2, 6, 10, 14, 18, 21), 8),
            "leading_dense_block_count": 2,
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 1792,
            "expert_gating_func": 2,
        },
    ),
    # https://huggingface.co/state-spaces/mamba-2.8b-hf
    "mamba-2.8b": Shape(
        *("mamba", 64, 2560, 1, 1, 64, 1, 50280, True),
        {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 5120,
            "ssm.state_size": 16,
            "ssm.time_step_rank": 160,
        },
        ("ssm_conv1d.bias",),
    ),
    "mamba2-2.7b": Shape(
        *("mamba2", 64, 2560, 1, 1, 64, 1, 50288, True),
        {
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 5120,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 80,
            "ssm.group_count": 1,
        },
        ("ssm_conv1d.bias",),
    ),
    # https://huggingface.co/RWKV/RWKV7-Goose-World3-1.5B-HF
    "rwkv7-1.5b": Shape(
        *("rwkv7", 24, 2048, 32, 32, 64, 8192, 65536, False),
        {
            **_LAYER_NORM,
            "wkv.head_size": 64,
            "token_shift_count": 2,
            "attention.decay_lora_rank": 96,
            "attention.iclr_lora_rank": 96,
            "attention.value_residual_mix_lora_rank": 64,
            "attention.gate_lora_rank": 256,
        },
        tuple(f"time_mix_{of}.weight" for of in ("w0", "a0", "v0", "g1", "ln")),
    ),
    "granite-4.0-h-small": Shape(
        *("granitehybrid", 40, 4096, 32, 8, 128, 768, 100352, True),
        {
            "attention.head_count_kv": _of_layers(40, (5, 15, 25, 35), 8),
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 8192,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 128,
            "ssm.group_count": 1,
            "expert_count": 72,
            "expert_used_count": 10,
            "expert_shared_feed_forward_length": 1536,
            "embedding_scale": 12.0,
            "attention.scale": 0.0078125,
            "residual_scale": 0.22,
            "logit_scale": 16.0,
        },
        ("ffn_gate_exps.weight", "ffn_gate_shexp.weight", "ssm_conv1d.bias"),
    ),
    # https://huggingface.co/tiiuae/Falcon-H1-7B-Base
    "falcon-h1-7b": Shape(
        *("falcon-h1", 44, 3072, 12, 2, 128, 12288, 130048, False),
        {
            **_turns(1e11),
            "context_length": 262144,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 3072,
            "ssm.state_size": 256,
            "ssm.time_step_rank": 24,
            "ssm.group_count": 1,
        },
        ("ffn_gate.weight", "ssm_conv1d.bias"),
    ),
    "nemotron-h-8b": Shape(
        *("nemotron_h", 52, 4096, 32, 8, 128, 21504, 131072, False),
        {
            "context_length": 8192,
            "attention.head_count_kv": _of_layers(
                52, [i for i, kind in enumerate(_NEMOTRON) if kind == "*"], 8
            ),
            "feed_forward_length": _of_layers(
                52, [i for i, kind in enumerate(_NEMOTRON) if kind == "-"], 21504
            ),
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 8192,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 128,
            "ssm.group_count": 8,
        },
        ("ssm_conv1d.bias",),
    ),
    "kimi-linear-48b-a3b": Shape(
        *("kimi-linear", 27, 2304, 32, 32, 192, 9216, 163840, False),
        {
            "context_length": 1048576,
            "attention.head_count_kv": _of_layers(27, (3, 7, 11, 15, 19, 23, 26), 32),
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "kda.head_dim": 128,
            "ssm.conv_kernel": 4,
            "leading_dense_block_count": 1,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 1024,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.446,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight"),
    ),
    "deepseek-v2-lite": Shape(
        *("deepseek2", 27, 2048, 16, 1, 192, 10944, 102400, False),
        {
            **_turns(10000.0),
            **_SMALL_EPS,
            "context_length": 163840,
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "leading_dense_block_count": 1,
            "expert_count": 64,
            "expert_used_count": 6,
            "expert_feed_forward_length": 1408,
            "expert_shared_count": 2,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight"),
    ),
    # What one of eight GPUs has of eight layers of DeepSeek V3.2: 16 of 128 heads, an eighth of
    # every FFN and of the vocabulary; latent vectors and indexers are whole.
    "deepseek-v3.2-share": Shape(
        *("deepseek32", 8, 7168, 16, 1, 192, 2304, 16160, False),
        {
            **_turns(10000.0),
            **_SMALL_EPS,
            "context_length": 163840,
            "attention.q_lora_rank": 1536,
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "attention.indexer.head_count": 64,
            "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 2048,
            "rope.dimension_count": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 40.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_log_multiplier": 0.1,
            "leading_dense_block_count": 1,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_group_count": 8,
            "expert_group_used_count": 4,
            "expert_feed_forward_length": 256,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight", "exp_probs_b.bias"),
    ),
    # What one of eight GPUs has of eight layers of DeepSeek V4 Flash: all of attention, an eighth
    # of every FFN and of the vocabulary; no experts by token.
    # https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Base
    "deepseek-v4-flash-share": Shape(
        *("deepseek4", 8, 4096, 64, 1, 512, 256, 16160, False),
        {
            **_turns(10000.0),
            **_SMALL_EPS,
            "context_length": 1048576,
            "attention.q_lora_rank": 1024,
            "attention.sliding_window": 128,
            "attention.compress_ratios": np.array([0, 0, 4, 128, 4, 128, 4, 128]),
            "attention.compress_rope_freq_base": 160000.0,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 1024,
            "attention.indexer.head_count": 64,
            "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 512,
            "rope.dimension_count": 64,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 65536,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 20,
            "hyper_connection.epsilon": 1e-6,
            "expert_count": 256,
            "expert_used_count": 6,
            "expert_feed_forward_length": 256,
            "expert_shared_count": 1,
            "expert_gating_func": 4,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "swiglu_clamp_exp": 10.0,
        },
        ("ffn_gate.weight", "ffn_gate_shexp.weight", "exp_probs_b.bias"),
    ),
}
