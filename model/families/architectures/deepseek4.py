"""DeepSeek V4: attention to a window and to compressed blocks of tokens, hyper-connections, and
experts with a limit.

A layer attends to the last tokens alone (ratio 0), to every block of 128 tokens, too, or to blocks
of 4 that an indexer selects (attention.compress_ratios). Blocks of 4 overlap.

Keys: those of `parts`, `mixtures` and `hyper`; attention.q_lora_rank, sliding_window,
output_group_count, output_lora_rank, compress_ratios, compress_rope_freq_base (of layers with
blocks, which rope.scaling extends); attention.indexer.head_count, key_length, top_k (blocks);
rope.dimension_count (the last values of a head rotate); swiglu_clamp_exp, swiglu_clamp_shexp
(default: as the other); expert_gating_func (others than 4, the root of softplus, are refused);
hash_layer_count (of layers whose experts are those of a token). llama.cpp: `src/models/`
deepseek4.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures.deepseek32 import check_indexer
from urdir.model.families.attention import Attention
from urdir.model.families.compression import BlockIndexer, Compression, Compressor
from urdir.model.families.dense import rms_decoder, weightless
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.hyper import stream_join, with_streams
from urdir.model.families.mixtures import limited
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import head_dims, heads, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, read_base, read_rope, windowed_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.rotation import RopeScaling

#: Tokens of a block, and whether it is made of those of the block before, too.
_RATIOS = {4: True, 128: False}
#: The number of the scoring of experts.
_SQRT_SOFTPLUS = 4


def deepseek4(file: Reader) -> Description:
    """DeepSeek V4."""
    if file.size("expert_gating_func") != _SQRT_SOFTPLUS:
        raise UnsupportedError(
            f"{file.key('expert_gating_func')} is {file.size('expert_gating_func')}: "
            f"{_SQRT_SOFTPLUS} (the root of softplus) is supported"
        )
    by_token = file.count("hash_layer_count")
    if by_token > file.layer_count():
        raise ConfigError(
            f"{file.key('hash_layer_count')} is {by_token} of {file.layer_count()} layers"
        )
    ratios = _ratios(file)
    limits = file.by_layer("swiglu_clamp_exp", float, 0.0)
    shared = file.by_layer("swiglu_clamp_shexp", float, 0.0)
    shared = shared if file.has_key("swiglu_clamp_shexp") else limits

    def network(index: int) -> Mixture:
        inside, outside = (limited(of[index], "inputs") for of in (limits, shared))
        options: dict[str, Any] = {"scores": "sqrt_softplus"}
        if index >= by_token:
            return scored_experts(file, index, None, inside, outside, **options)
        options |= {"choice_bias": "absent", "normalize": True}
        mixture = scored_experts(file, index, None, inside, outside, **options)
        shape = file.stored["token_embd.weight"][0], mixture.router.used
        table = file.vector("ffn_gate_tid2eid.weight", index, *shape)
        return replace(mixture, router=replace(mixture.router, by_token=table))

    description = rms_decoder(
        file,
        lambda index: _attention(file, index, ratios[index]),
        network,
        output="required",
        unused=("exp_probs_b_vl.bias",),
        nextn=NextnKind(rms_norm(file), passes_normed=False),
        join=stream_join(file),
    )
    first = description.n_layers
    nextn = (
        replace(head, layer=with_streams(file, first + at, head.layer))
        for at, head in enumerate(description.nextn)
    )
    return replace(
        description,
        layers=tuple(with_streams(file, *at) for at in enumerate(description.layers)),
        nextn=tuple(nextn),
        ignored_keys=file.ignored_keys,
    )


def _ratios(file: Reader) -> list[int]:
    """Tokens of a block in each layer; 0: no blocks."""
    key, layers = file.key("attention.compress_ratios"), len(file.described_layers)
    ratios = file.integers("attention.compress_ratios")
    if len(ratios) < layers:
        raise ConfigError(f"metadata key '{key}' has {len(ratios)} values for {layers} layers")
    if other := [ratio for ratio in ratios[:layers] if ratio and ratio not in _RATIOS]:
        known = ", ".join(map(str, (0, *_RATIOS)))
        raise UnsupportedError(f"{key} has {other[0]}: {known} are supported")
    for layer in file.nextn_layers:
        if ratios[layer]:
            raise UnsupportedError(f"{key} of layer {layer}, which is for MTP, is not 0")
    return ratios


def _attention(file: Reader, layer: int, ratio: int) -> Attention:
    norm, (dim, value_dim) = rms_norm(file), head_dims(file)
    count, keys = heads(file, layer)
    if keys != 1 or value_dim != dim or dim % 8:
        raise UnsupportedError(
            f"{file.key('attention.head_count_kv')} is {keys}, with keys of {dim} and values of "
            f"{value_dim}: one head of a multiple of 8 values, which is key and value, is supported"
        )
    groups = file.size("attention.output_group_count")
    rank = file.size("attention.output_lora_rank")
    if count % groups:
        raise ConfigError(
            f"{count} heads in {groups} groups ({file.key('attention.output_group_count')})"
        )
    stored = file.stored.get(f"blk.{layer}.attn_output_a.weight", ())
    of_groups = (groups * rank,) if len(stored) == 2 else (groups, rank)
    shape = *of_groups, count // groups * dim
    low, rope = file.size("attention.q_lora_rank"), _rope(file, dim, bool(ratio))
    return Attention(
        heads=count,
        kv_heads=1,
        key_dim=dim,
        value_dim=dim,
        scale=1.0 / math.sqrt(dim),
        q=file.linear("attn_q_b", layer, count * dim, low),
        k=file.linear("attn_kv", layer, dim, file.hidden),
        v=None,
        o=file.linear("attn_output_b", layer, file.hidden, groups * rank),
        rope=rope,
        sinks=file.vector("attn_sinks.weight", layer, count),
        compression=Compression(
            window=file.size("attention.sliding_window"),
            q_down=file.linear("attn_q_a", layer, low, file.hidden),
            q_norm=file.norm("attn_q_a_norm", layer, norm, low),
            head_norm=weightless(norm),
            k_norm=file.norm("attn_kv_a_norm", layer, norm, dim),
            o_down=file.linear("attn_output_a", layer, *shape),
            groups=groups,
            blocks=_compressor(file, "attn", layer, ratio, dim) if ratio else None,
            index=_indexer(file, layer, ratio, rope) if _RATIOS.get(ratio) else None,
        ),
    )


def _rope(file: Reader, dim: int, compressed: bool) -> RopeConfig:
    """The rotation of the last values of heads; magnitudes are 1 in spite of YaRN."""
    rope = read_rope(file, "interleaved", dim, dim=dim, factors=False)
    if rope.dim % 8:
        raise UnsupportedError(
            f"{file.key('rope.dimension_count')} is {rope.dim}: multiples of 8 are supported"
        )
    if file.of_folder:
        return rope if compressed else windowed_rope(file, rope, dim, scaled=False)
    if not compressed:
        return replace(rope, scaling=RopeScaling.none())
    base, scaling = read_base(file, "attention.compress_rope_freq_base", 1e4), rope.scaling
    own = 1.0 / (1.0 + 0.1 * math.log(scaling.factor)) if scaling.ext_factor else 1.0
    return replace(rope, freq_base=base, scaling=replace(scaling, attn_factor=own))


def _compressor(file: Reader, name: str, layer: int, ratio: int, dim: int) -> Compressor:
    width = (2 if _RATIOS[ratio] else 1) * dim
    keys, gate = (
        file.linear(f"{name}_compressor_{of}", layer, width, file.hidden) for of in ("kv", "gate")
    )
    places = file.vector(f"{name}_compressor_ape.weight", layer, ratio, width)
    norm = file.norm(f"{name}_compressor_norm", layer, rms_norm(file), dim)
    return Compressor(ratio, keys, gate, places, norm)


def _indexer(file: Reader, layer: int, ratio: int, rope: RopeConfig) -> BlockIndexer:
    count, dim, most = check_indexer(file, rope, ratio)
    low = file.size("attention.q_lora_rank")
    return BlockIndexer(
        count,
        dim,
        most * ratio,
        q=file.linear("indexer.attn_q_b", layer, count * dim, low),
        weights=file.linear("indexer.proj", layer, count, file.hidden),
        blocks=_compressor(file, "indexer", layer, ratio, dim),
    )


ARCHITECTURES = {"deepseek4": deepseek4}
