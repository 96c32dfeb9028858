"""DeepSeek V2, V3, R1, Kimi K2, Mistral 4 and similar models: MLA and fine-grained experts.

MLA is multi-head latent attention (arXiv 2405.04434); the experts are those of arXiv 2401.06066.
Keys: those of `parts`, `rope`, `latent` and `mixtures`, attention.layer_norm_rms_epsilon;
attention.q_lora_rank, rope.dimension_count (the rotated part of a head),
rope.scaling.yarn_log_multiplier, attention.temperature_scale and temperature_length;
expert_feed_forward_length, expert_shared_count, expert_gating_func, expert_weights_norm,
expert_weights_scale, leading_dense_block_count. llama.cpp: `src/models/` deepseek2.cpp,
mistral4.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder
from urdir.model.families.description import Description
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.layers import LayerConfig
from urdir.model.families.mixtures import leading_dense, scoring, unless_dense
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, read_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.attention.own_token import Temperature

#: Layer counts of the models without a low-rank query projection, whatever their metadata say.
_LITE = (26, 27)


def deepseek2(file: Reader) -> Description:
    """DeepSeek 2 layout. Old files that store keys and values as one matrix (attn_kv_b) are
    refused."""
    vocab = file.stored.get("token_embd.weight", (0,))[0]
    layers = file.layer_count()
    is_glm = layers in (47, 48) and vocab == 154880
    scores = scoring(file, "sigmoid" if is_glm else "softmax")
    if file.of_folder:
        rank = file.count("attention.q_lora_rank")
    else:
        is_lite = layers in _LITE or (layers == 48 and vocab == 128256)
        rank = 0 if is_lite else file.size("attention.q_lora_rank")

    network = partial(scored_experts, file, scores=scores, choice_bias="optional")
    return rms_decoder(
        file,
        lambda index: _attention(file, index, rank),
        unless_dense(file, network),
        nextn=NextnKind(rms_norm(file), passes_normed=True),
    )


def axk1(file: Reader) -> Description:
    """A.X K1 (SK Telecom): a norm after the experts. Published folders have one in dense layers,
    too, which its class does not use. Folders only."""
    found, norm, first = deepseek2(file), rms_norm(file), leading_dense(file)

    def normed(index: int, layer: LayerConfig) -> LayerConfig:
        mixer, network = layer.blocks
        after = replace(network, post_norm=file.norm("post_ffw_norm", index, norm))
        return replace(layer, blocks=(mixer, after))

    layers = found.layers[:first] + tuple(
        normed(first + index, layer) for index, layer in enumerate(found.layers[first:])
    )
    names = (f"blk.{index}.post_ffw_norm.weight" for index in range(first))
    unused = tuple(name for name in names if name in file.stored)
    return replace(found, layers=layers, unused_tensors=(*found.unused_tensors, *unused))


def _attention(file: Reader, layer: int, rank: int) -> Attention:
    rope, scale = scaled_rope(file, latent_head_dims(file)[0])
    return latent_attention(
        file,
        layer,
        file.size_at("attention.head_count", layer),
        rope.dim,
        rank,
        rope=rope,
        scale=scale,
        temperature=_temperature(file),
    )


def scaled_rope(file: Reader, key_dim: int) -> tuple[RopeConfig, float]:
    """The rotation and the scale of attention scores. YaRN multiplies scores by m^2 (arXiv
    2309.00071) and leaves rotated values unscaled: the magnitude of the rotation is divided out
    (llama.cpp: `deepseek2.cpp`, `llama-context.cpp`)."""
    rope = read_rope(file, "interleaved", key_dim, factors=False)
    if file.of_folder:
        return rope, 1.0 / math.sqrt(key_dim)
    scaling, growth = rope.scaling, math.log(rope.scaling.factor)
    stored = file.optional("rope.scaling.attn_factor", float, 1.0)
    multiplier = file.optional("rope.scaling.yarn_log_multiplier", float, 0.0) / 0.1
    factor = stored
    if scaling.ext_factor:
        own = 1.0
        if multiplier:
            usual = file.architecture != "deepseek2" or multiplier == 1.0
            own = 1.0 if usual else multiplier
        above = growth if scaling.factor > 1.0 else 0.0
        ratio = (1.0 + 0.1 * own * above) / (1.0 + 0.1 * multiplier * above)
        factor = stored * ratio / (1.0 + 0.1 * growth)
    m = factor * (1.0 + 0.1 * growth) * (1.0 + 0.1 * multiplier * growth)
    scale = m * m / math.sqrt(key_dim)
    if not 1e-37 < scale < 1e38:
        key = file.key("rope.scaling.attn_factor")
        raise ConfigError(f"'{key}' multiplies scores by {scale:g}, beyond what 32 bits hold")
    return replace(rope, scaling=replace(scaling, attn_factor=factor)), scale


def _temperature(file: Reader) -> Temperature | None:
    scale = file.optional("attention.temperature_scale", float, 0.0)
    length = file.own("temperature_length", int, 0)
    if not scale:
        return None
    return Temperature(scale, length or file.size("attention.temperature_length"))


ARCHITECTURES = {"deepseek2": deepseek2, "mistral4": deepseek2, "axk1": axk1}
