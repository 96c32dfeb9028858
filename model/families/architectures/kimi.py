"""Kimi Linear (arXiv 2510.26692) and Ling 3: Kimi Delta Attention in most layers, MLA in the rest.

Kimi Delta Attention is the delta rule with a gate for each key channel.

    x += o (RMSNorm(delta(q, k, v, f x', b x')) * sigmoid(g x'))    q, k, v = silu(conv(W x'))
    x += o attention(x')                                            in the other layers
    x += network(x')                                                x' = RMSNorm(x)

Keys: those of `parts`, `latent`, `kimi_delta` and `mixtures`; rope.dimension_count,
expert_feed_forward_length, expert_shared_count, expert_gating_func, expert_weights_scale,
leading_dense_block_count; each family lists its own. llama.cpp: `src/models/` kimi-linear.cpp,
bailingmoe3.cpp.
"""

from __future__ import annotations

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.kimi_delta import heads_of_all, kimi_decoder, kimi_delta, low_rank
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.mixtures import (
    expert_width,
    leading_dense,
    limited,
    plain_dense,
    shared_count,
    shared_width,
    unless_dense,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import output_gate, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import KimiDelta
from urdir.model.families.rope import read_rope_by_axes
from urdir.model.families.scored_experts import scored_experts


def kimi_linear(file: Reader) -> Description:
    """Kimi Linear: no RoPE; decays and gates are low-rank products, of rank head dimension.
    llama.cpp loads biases of Q, K and V without using them."""
    heads, dim = heads_of_all(file), latent_head_dims(file)[0]
    shared = file.optional("rope.dimension_count", int, dim)

    def delta(index: int) -> KimiDelta:
        decay, gate = (low_rank(file, index, name, heads) for name in ("ssm_f", "ssm_g"))
        return kimi_delta(file, index, heads, decay, gate)

    def experts(index: int) -> Mixture:
        width = expert_width(file, index) * max(1, shared_count(file))
        return scored_experts(file, index, width, normalize=True)

    return kimi_decoder(
        file,
        lambda index: latent_attention(file, index, heads, shared),
        delta,
        unless_dense(file, experts),
    )


def bailingmoe3(file: Reader) -> Description:
    """Ling 3 (inclusionAI): MLA with RoPE and output gates; decays have a lower bound.

    Keys: those of `rope`, attention.q_lora_rank, kda.gate_lower_bound, kda.safe_gate (false is
    refused), rope.dimension_sections, expert_shared_feed_forward_length, expert_weights_norm,
    swiglu_clamp_exp and swiglu_clamp_shexp (of the dense layers, too).
    """
    heads = heads_of_all(file)
    rank = file.count("attention.q_lora_rank")
    dim = latent_head_dims(file)[0]
    floor = file.required("kda.gate_lower_bound", float)
    if not file.optional("kda.safe_gate", bool, True) or floor >= 0.0:
        raise UnsupportedError(
            f"{file.key('kda.gate_lower_bound')} is {floor} (kda.safe_gate): only a bound "
            "below 0 is supported"
        )
    rope = read_rope_by_axes(file, dim)
    limits = file.by_layer("swiglu_clamp_exp", float, 0.0)
    shared_limits = file.by_layer("swiglu_clamp_shexp", float, 0.0)

    def attends(index: int) -> Attention:
        name = "ssm_g_a" if file.of_folder else "attn_gate"
        gate = output_gate(file, index, heads, "sigmoid", name)
        return latent_attention(file, index, heads, rope.dim, rank, rope=rope, gate=gate)

    def delta(index: int) -> KimiDelta:
        width = heads * file.size("kda.head_dim")
        decay, gate = (
            file.linear(name, index, width, file.hidden) for name in ("ssm_f_a", "ssm_g_a")
        )
        return kimi_delta(file, index, heads, (decay, None), (gate, None), floor)

    def network(index: int) -> Dense | Mixture:
        beside = limited(shared_limits[index], "activated")
        if index < leading_dense(file):
            return plain_dense(file, index, beside)
        inside = limited(limits[index], "activated")
        width = shared_width(file, expert_width(file, index) * max(1, shared_count(file)))
        return scored_experts(file, index, width, inside, beside)

    nextn = NextnKind(rms_norm(file), passes_normed=True)
    return kimi_decoder(file, attends, delta, network, nextn)


ARCHITECTURES = {"kimi-linear": kimi_linear, "bailingmoe3": bailingmoe3}
