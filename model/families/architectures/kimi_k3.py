"""Kimi K3: Kimi Delta Attention and gated MLA, latent experts, attention residuals.

Attention residuals mix the residual stream with copies banked by earlier layers. llama.cpp:
`src/models/` kimi-k3.cpp.

    y = sum of p_i s_i over the banked streams and x, p = softmax(w . RMSNorm(s_i))
    x += mixer(RMSNorm(y))          every block_size layers x is banked first and restarts at 0
    x += network(RMSNorm(y))        y is computed again, with its own weights

Keys: those of `parts`, `latent`, `kimi_delta` and `mixtures`; rope.dimension_count,
attention.q_lora_rank, kda.gate_lower_bound, attn_res.block_size (layers between banked streams;
0: none), activation.situ_beta and situ_linear_beta, expert_latent_length (0: the hidden size),
expert_feed_forward_length, expert_shared_count, expert_gating_func, expert_weights_norm,
expert_weights_scale, leading_dense_block_count.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, LatentExperts, Mixture
from urdir.model.families.kimi_delta import heads_of_all, kimi_decoder, kimi_delta, low_rank
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.layers import LayerConfig
from urdir.model.families.mixtures import expert_width, leading_dense, plain_dense, shared_count
from urdir.model.families.parts import output_gate, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import KimiDelta
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recall import MAX_BANKS


def kimi_k3(file: Reader) -> Description:
    """Kimi K3, text only. Without kda.gate_lower_bound decays are those of Kimi Linear."""
    heads, (dim, value_dim) = heads_of_all(file), latent_head_dims(file)
    shared = file.optional("rope.dimension_count", int, dim)
    floor = file.optional("kda.gate_lower_bound", float, 0.0)
    if floor > 0.0 or (file.has_key("kda.gate_lower_bound") and not floor):
        raise UnsupportedError(f"{file.key('kda.gate_lower_bound')} is {floor}, not below 0")
    bounds = file.number("activation.situ_beta"), file.amount("activation.situ_linear_beta")
    situ = Activation("situ", parameters=bounds)

    def attends(index: int) -> Attention:
        low = file.has("attn_q_a_norm.weight", index)
        rank = file.size("attention.q_lora_rank") if low else 0
        gated = file.has("attn_gate.weight", index)
        gate = output_gate(file, index, heads * value_dim, "sigmoid") if gated else None
        return latent_attention(file, index, heads, shared, rank, gate=gate)

    def delta(index: int) -> KimiDelta:
        width = heads * file.size("kda.head_dim")
        gate = file.linear("ssm_g", index, width, file.hidden)
        decay = low_rank(file, index, "ssm_f", heads)
        return kimi_delta(file, index, heads, decay, (gate, None), floor, negated=bool(floor))

    def network(index: int) -> Dense | Mixture:
        if index < leading_dense(file):
            return plain_dense(file, index, situ)
        return _experts(file, index, situ)

    description = kimi_decoder(file, attends, delta, network)
    every = file.count("attn_res.block_size")
    if not every:
        return replace(description, ignored_keys=file.ignored_keys)
    if description.n_layers > every * MAX_BANKS:
        raise UnsupportedError(
            f"{file.key('attn_res.block_size')} is {every} with {description.n_layers} layers: "
            f"more than {MAX_BANKS} banked streams"
        )
    return replace(
        description,
        layers=tuple(
            _recalling(file, index, layer, banks=index % every == 0)
            for index, layer in enumerate(description.layers)
        ),
        recalls=file.norm("output_res_score", None, rms_norm(file)),
        ignored_keys=file.ignored_keys,
    )


def _recalling(file: Reader, index: int, layer: LayerConfig, *, banks: bool) -> LayerConfig:
    norm, (mixer, network) = rms_norm(file), layer.blocks
    first, second = (file.norm(f"{of}_res_score", index, norm) for of in ("attn", "ffn"))
    blocks = replace(mixer, recalls=first, banks=banks), replace(network, recalls=second)
    return replace(layer, blocks=blocks)


def _experts(file: Reader, layer: int, situ: Activation) -> Mixture:
    narrow, norm, latent = file.count("expert_latent_length"), None, None
    if narrow:
        if file.has("ffn_routed_norm.weight", layer):
            norm = file.norm("ffn_routed_norm", layer, rms_norm(file), narrow)
        latent = LatentExperts(
            file.linear("ffn_routed_down", layer, narrow, file.hidden),
            file.linear("ffn_routed_up", layer, file.hidden, narrow),
            norm,
        )
    beside = 0
    if file.has("ffn_gate_shexp.weight", layer):
        beside = expert_width(file, layer) * max(1, shared_count(file))
    return scored_experts(file, layer, beside, situ, latent=latent)


ARCHITECTURES = {"kimi-k3": kimi_k3}
