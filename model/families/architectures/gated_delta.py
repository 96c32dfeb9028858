"""Qwen 3.5 and Qwen3-Next: gated delta rule in three of four layers, gated attention in the rest.

The delta rule is that of Yang et al. 2024 (arXiv 2412.06464); attention is gated elementwise.

    x += o (RMSNorm(delta(silu(conv(qkv x')))) * silu(z x'))         x' = RMSNorm(x)
    x += o (attention(x') * sigmoid(gate x'))                       in the other layers
    x += network(x')                                                x' = RMSNorm(x)

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon;
attention.recurrent_layers (a flag for each layer) or full_attention_interval (default 4);
ssm.conv_kernel, ssm.state_size (head dimension), ssm.group_count (key heads), ssm.time_step_rank
(value heads), ssm.inner_size (all value heads together); rope.dimension_sections (Qwen 3.5),
expert_feed_forward_length, expert_shared_feed_forward_length. llama.cpp: `src/models/` qwen35.cpp,
qwen35moe.cpp, qwen3next.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention, OutputGate
from urdir.model.families.dense import decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.layers import Network
from urdir.model.families.mixtures import (
    dense_width,
    divided_width,
    mixture,
    plain_dense,
    router,
    shared_expert,
    shared_width,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import head_dims, heads, qkv, required_head_norms, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Recurrence, convolution
from urdir.model.families.rope import RopeConfig, with_sections
from urdir.model.families.stored import Linear


def qwen35(file: Reader) -> Description:
    """Qwen 3.5, dense, text only."""
    rope = with_sections(file, shared_rope(file, "half"), interleaved=True)
    return _decoder(file, rope, lambda layer: plain_dense(file, layer))


def qwen35moe(file: Reader) -> Description:
    """Qwen 3.5 with experts, text only."""
    rope = with_sections(file, shared_rope(file, "half"), interleaved=True)
    return _decoder(file, rope, gated_experts(file))


def qwen3next(file: Reader) -> Description:
    """Qwen3-Next: beta and alpha are one matrix, interleaved by key head. Older files store a
    matrix ssm_in beside attn_qkv, which is ignored."""
    return _decoder(file, shared_rope(file, "half"), gated_experts(file))


def _decoder(file: Reader, rope: RopeConfig, network: Callable[[int], Network]) -> Description:
    norm, recurrent = rms_norm(file), recurrent_layers(file)
    return decoder(
        file,
        norm,
        lambda i: delta_net(file, i) if recurrent[i] else gated_attention(file, i, rope),
        network,
        norms=("attn_norm", "post_attention_norm"),
        unused=("ssm_in.weight",),
        nextn=NextnKind(norm, passes_normed=True),
    )


def recurrent_layers(file: Reader) -> list[bool]:
    """Whether each layer has the delta rule."""
    name = "attention.recurrent_layers"
    if file.has_key(name):
        flags = file.by_layer(name, bool)
    else:
        interval = file.size("full_attention_interval", 4)
        flags = [(layer + 1) % interval != 0 for layer in file.described_layers]
    return [flag and layer not in file.nextn_layers for layer, flag in enumerate(flags)]


def gated_experts(file: Reader, *, normalize: bool = True) -> Callable[[int], Mixture]:
    """The experts of a layer, with a gated shared one; weights of those chosen sum to 1 if
    normalised."""

    def network(index: int) -> Mixture:
        width = shared_width(file, 0) or dense_width(file, index)
        return mixture(
            file,
            index,
            router(file, index, normalize=normalize),
            divided_width(file, index),
            shared=shared_expert(file, index, width),
            shared_gate=Linear(file.matrix("ffn_gate_inp_shexp", index, file.hidden)),
        )

    return network


def gated_attention(file: Reader, layer: int, rope: RopeConfig) -> Attention:
    """Gated attention: in the rows of attn_q each head is followed by its gate."""
    (queries, keys), (dim, value_dim) = heads(file, layer), head_dims(file)
    if value_dim != dim:
        raise ConfigError(
            f"key heads have {dim} values ({file.key('attention.key_length')}), "
            f"value heads {value_dim} (attention.value_length); expected the same number"
        )
    both, k, v = qkv(file, layer, (2 * queries * dim, keys * dim, keys * dim))
    return Attention(
        heads=queries,
        kv_heads=keys,
        key_dim=dim,
        value_dim=dim,
        scale=1.0 / math.sqrt(dim),
        q=both.part(0, dim, 2 * dim),
        k=k,
        v=v,
        o=file.linear("attn_output", layer, file.hidden, queries * dim),
        rope=rope,
        qk_norm=required_head_norms(file, layer, rms_norm(file), dim),
        gate=OutputGate(both.part(dim, dim, 2 * dim), "sigmoid"),
    )


def delta_net(file: Reader, layer: int) -> Recurrence:
    """The gated delta rule of a layer."""
    norm, hidden, dim = rms_norm(file), file.hidden, file.size("ssm.state_size")
    queries, values = file.size("ssm.group_count"), file.size("ssm.time_step_rank")
    if values % queries or file.size("ssm.inner_size") != values * dim:
        raise ConfigError(
            f"{values} value heads ({file.key('ssm.time_step_rank')}) of {dim} values "
            f"(ssm.state_size), {queries} key heads (ssm.group_count), "
            f"{file.size('ssm.inner_size')} values in all (ssm.inner_size)"
        )
    width = 2 * queries * dim + values * dim
    alpha, beta = _gates(file, layer, queries, values)
    return Recurrence(
        mixed=file.linear("attn_qkv", layer, width, hidden),
        conv=convolution(file, "ssm.conv_kernel", "ssm_conv1d", layer, width),
        gate=file.linear("attn_gate", layer, values * dim, hidden),
        alpha=alpha,
        beta=beta,
        a=file.vector("ssm_a", layer, values),
        dt_bias=file.vector("ssm_dt.bias", layer, values),
        skip=None,
        norm=file.norm("ssm_norm", layer, norm, dim),
        o=file.linear("ssm_out", layer, hidden, values * dim),
        heads=values,
        key_heads=queries,
        key_dim=dim,
        value_dim=dim,
        eps=norm.eps,
        tiled=file.architecture != "qwen3next" and not file.of_folder,
    )


def _gates(file: Reader, layer: int, queries: int, values: int) -> tuple[Linear, Linear]:
    """The projections of alpha and beta: separate, or one matrix that stores the betas of each key
    head before its alphas."""
    hidden = file.hidden
    if file.architecture != "qwen3next":
        alpha = file.linear("ssm_alpha", layer, values, hidden)
        return alpha, file.linear("ssm_beta", layer, values, hidden)
    group = values // queries
    both = file.linear("ssm_ba", layer, 2 * values, hidden)
    return both.part(group, group, 2 * group), both.part(0, group, 2 * group)


ARCHITECTURES = {"qwen35": qwen35, "qwen35moe": qwen35moe, "qwen3next": qwen3next}
