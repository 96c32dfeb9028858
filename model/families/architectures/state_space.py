"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060) and hybrids: Granite 4, Falcon-H1, Nemotron-H.

llama.cpp: `src/models/` mamba-base.cpp, mamba2.cpp, granite-hybrid.cpp, falcon-h1.cpp,
nemotron-h.cpp.

    x += o RMSNorm(ssd(silu(conv(xBC)), dt) * silu(z))        z, xBC, dt = ssm_in x'
                                                              x' = RMSNorm(x)

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon; ssm.conv_kernel,
ssm.inner_size (values of all heads), ssm.time_step_rank (heads), ssm.group_count (heads of B and
C), ssm.state_size (values of such a head); each family lists its own.
"""

from __future__ import annotations

from urdir.model.errors import ConfigError
from urdir.model.families.dense import rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import LatentExperts, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.mixtures import (
    divided_width,
    has_experts,
    mixture,
    optional_mixture,
    router,
    shared_width,
    weights_norm,
    weights_scale,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import RELU2, attention, dense, model, rms_norm, sequential
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Recurrence, convolution
from urdir.ptxgen.kernels.norm import Norm


def mamba2(file: Reader) -> Description:
    """Mamba-2: every layer is one Mamba-2 mixer, without an FFN."""
    norm = rms_norm(file)
    return model(
        file,
        lambda index: _alone(file, index, mamba2_mixer(file, index, norm), norm),
        file.norm("output_norm", None, norm),
    )


def granitehybrid(file: Reader) -> Description:
    """Granite 4 (IBM): attention where attention.head_count_kv is not 0, an FFN in every layer.

    Keys: logit_scale (divides), residual_scale, embedding_scale, attention.scale (0 counts as
    absent), rope.scaling.finetuned (false: no RoPE), expert_shared_feed_forward_length.
    """
    norm, shared = rms_norm(file), shared_width(file, 0)
    scale = file.amount("attention.scale") or None
    kv_heads = file.by_layer("attention.head_count_kv", int)
    rope = shared_rope(file, "interleaved", factors=True)
    rotates = file.optional("rope.scaling.finetuned", bool, True)

    def mixer(index: int) -> Network:
        if kv_heads[index]:
            return attention(file, index, rope if rotates else None, scale=scale)
        return mamba2_mixer(file, index, norm)

    return rms_decoder(
        file,
        mixer,
        lambda index: optional_mixture(file, index, shared),
        scale=file.amount("residual_scale") or 1.0,
        embedding_scale=file.amount("embedding_scale") or 1.0,
        logit_scale=1.0 / (file.amount("logit_scale") or 1.0),
    )


def falcon_h1(file: Reader) -> Description:
    """Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 in parallel in every layer. llama.cpp
    loads the bias of attention's output and RoPE factors without using them."""
    norm, normed = rms_norm(file), file.anywhere("ssm_norm.weight")
    rope = shared_rope(file, "half")
    value_scale = file.own("value_scale", float, 1.0)
    if file.of_folder:
        file.has_key("own.multipliers")  # of matrices, which have them

    def layer(index: int) -> LayerConfig:
        before = file.norm("attn_norm", index, norm)
        attends = attention(file, index, rope, output_bias="absent", value_scale=value_scale)
        mixer = mamba2_mixer(file, index, norm, normed=normed)
        # GGUF files lack the usual ".weight"
        name = "ffn_norm.weight" if file.of_folder else "ffn_norm"
        weight = file.vector(name, index, file.hidden)
        network = Branch(dense(file, index), type(before)(norm, weight))
        return LayerConfig(
            (Block((Branch(attends, before), Branch(mixer, before))), Block((network,)))
        )

    return model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        unused=("attn_output.bias", "rope_freqs.weight"),
        embedding_scale=file.own("embedding_scale", float, 1.0),
        logit_scale=file.own("logit_scale", float, 1.0),
    )


def nemotron_h(file: Reader) -> Description:
    """Nemotron-H (arXiv 2504.03624), and Nemotron 3 with experts.

    Each layer is one of Mamba-2, attention without RoPE, or an FFN: feed_forward_length is 0 in
    layers without an FFN, attention.head_count_kv in those without attention. An MTP head has
    attention and experts.
    Keys: attention.layer_norm_epsilon if the RMS epsilon is absent; expert_feed_forward_length,
    expert_shared_feed_forward_length, expert_weights_norm, expert_weights_scale; moe_latent_size:
    experts read a narrower vector.
    """
    eps = file.amount("attention.layer_norm_rms_epsilon")
    norm = Norm("rms", eps or file.number("attention.layer_norm_epsilon"))
    kv_heads = file.by_layer("attention.head_count_kv", int)
    widths = file.by_layer("feed_forward_length", int)

    def network(index: int) -> Network:
        if widths[index]:
            return _network(file, index)
        return attention(file, index, None) if kv_heads[index] else mamba2_mixer(file, index, norm)

    def layer(index: int) -> LayerConfig:
        if index not in file.nextn_layers:
            return _alone(file, index, network(index), norm)
        norms = (file.norm(f"{name}_norm", index, norm) for name in ("attn", "post_attention"))
        first, second = norms
        return sequential(attention(file, index, None), _network(file, index), (first, second))

    nextn = None
    if file.nextn_layers:
        centred = Norm("layer", file.number("attention.layer_norm_epsilon"))
        nextn = NextnKind(norm, passes_normed=True, head_norm=centred)
    return model(file, layer, file.norm("output_norm", None, norm), nextn=nextn)


def _network(file: Reader, layer: int) -> Network:
    """Nemotron's FFN, which has no gate."""
    if not has_experts(file):
        return dense(file, layer, RELU2, gated=False)
    route = router(
        file,
        layer,
        "sigmoid",
        normalize=weights_norm(file),
        scale=weights_scale(file),
        choice_bias="required",
    )
    width = file.size("expert_shared_feed_forward_length")
    shared = dense(file, layer, RELU2, gated=False, width=width, suffix="_shexp", bias="absent")
    width, latent = divided_width(file, layer), None
    if file.count("moe_latent_size") or file.has("ffn_latent_down.weight", layer):
        narrow = file.count("moe_latent_size") or file.hidden
        latent = LatentExperts(
            file.linear("ffn_latent_down", layer, narrow, file.hidden),
            file.linear("ffn_latent_up", layer, file.hidden, narrow),
        )
    experts: Mixture = mixture(
        file, layer, route, width, RELU2, shared=shared, gate="absent", latent=latent
    )
    return experts


def _alone(file: Reader, layer: int, network: Network, norm: Norm) -> LayerConfig:
    """A layer of one network."""
    return LayerConfig((Block((Branch(network, file.norm("attn_norm", layer, norm)),)),))


def mamba2_mixer(file: Reader, layer: int, norm: Norm, *, normed: bool = True) -> Recurrence:
    """The Mamba-2 mixer of a layer; the norm of its result may be missing."""
    hidden, inner = file.hidden, file.size("ssm.inner_size")
    heads, groups = file.size("ssm.time_step_rank"), file.size("ssm.group_count")
    if inner % heads or heads % groups:
        raise ConfigError(
            f"{inner} values of {heads} heads with {groups} groups ({file.key('ssm.inner_size')}, "
            "ssm.time_step_rank, ssm.group_count)"
        )
    dim = file.size("ssm.state_size")
    width = inner + 2 * groups * dim
    total = inner + width + heads
    parts = file.linear("ssm_in", layer, total, hidden)
    return Recurrence(
        mixed=parts.part(inner, width),
        conv=convolution(file, "ssm.conv_kernel", "ssm_conv1d", layer, width, bias="optional"),
        gate=parts.part(0, inner),
        alpha=parts.part(inner + width, heads),
        beta=None,
        a=file.vector("ssm_a", layer, heads, 1),
        dt_bias=file.vector("ssm_dt.bias", layer, heads),
        skip=file.vector("ssm_d", layer, heads, 1),
        norm=file.norm("ssm_norm", layer, norm, groups, inner // groups) if normed else None,
        o=file.linear("ssm_out", layer, hidden, inner),
        heads=heads,
        key_heads=groups,
        key_dim=dim,
        value_dim=inner // heads,
        gates_first=True,
    )


ARCHITECTURES = {
    "mamba2": mamba2,
    "granitehybrid": granitehybrid,
    "falcon-h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
}
