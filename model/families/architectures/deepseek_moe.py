"""Fine-grained experts beside shared ones (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066).

The first layers are dense.

    x += O attention(rope(Q x'), rope(K x'), V x')           x' = RMSNorm(x)
    x += sum of weight_e expert_e(x') + shared(x')           x' = RMSNorm(x)

llama.cpp: `src/models/` deepseek.cpp, deepseek2ocr.cpp, bailingmoe.cpp, bailingmoe2.cpp,
dots1.cpp, ernie4-5-moe.cpp, glm4-moe.cpp, hy-v3.cpp.

Keys: those of `parts`, `rope` and `mixtures`: expert_feed_forward_length, expert_shared_count (a
multiple of the width of an expert; Ling 2 and ERNIE: expert_shared_feed_forward_length),
leading_dense_block_count and, in the families that read them, expert_gating_func,
expert_weights_norm, expert_weights_scale; interleave_moe_layer_step (ERNIE),
rope.dimension_sections (GLM).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from urdir.model.families.dense import mixer, rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Network
from urdir.model.families.mixtures import (
    DENSE,
    EXPERTS,
    divided_width,
    expert_width,
    leading_dense,
    mixture,
    plain_dense,
    router,
    scoring,
    shared_count,
    shared_expert,
    shared_width,
    unless_dense,
    weights_norm,
    weights_scale,
    without,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import SILU, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import with_sections
from urdir.ptxgen.kernels.activation import Activation


def deepseek(file: Reader) -> Description:
    """DeepSeekMoE 16B: weights are the softmax over all experts, not normalised."""
    network = _fine_grained(file, normalize=False)
    return rms_decoder(
        file, mixer(file, shared_rope(file, "interleaved")), unless_dense(file, network)
    )


def deepseek_ocr(file: Reader) -> Description:
    """The text decoder of DeepSeek-OCR (arXiv 2510.18234): attention as in LLaMA."""
    options: dict[str, Any] = {"scores": scoring(file, "softmax"), "choice_bias": "optional"}
    network = _fine_grained(file, normalize=weights_norm(file), **options)
    return rms_decoder(file, mixer(file, shared_rope(file, "half")), unless_dense(file, network))


def bailingmoe(file: Reader) -> Description:
    """Ling-lite and Ling-plus (arXiv 2503.05139). leading_dense_block_count has no effect."""
    network = _fine_grained(file, normalize=weights_norm(file))
    return rms_decoder(
        file, mixer(file, shared_rope(file, "interleaved")), network, output="required"
    )


def bailingmoe2(file: Reader) -> Description:
    """Ling 2.0 and Ring 2.0: QK norms, sigmoid scores, a selection bias."""
    options: dict[str, Any] = {"scores": scoring(file), "choice_bias": "optional"}
    network = _fine_grained(
        file, normalize=weights_norm(file), shared=shared_width(file, 0), **options
    )
    attends = mixer(file, shared_rope(file, "half"), head_norm=True, qkv_bias="absent")
    return rms_decoder(file, attends, unless_dense(file, network), output="required")


def dots1(file: Reader) -> Description:
    """dots.llm1 (arXiv 2506.05767)."""
    options: dict[str, Any] = {"scores": scoring(file), "choice_bias": "optional"}
    network = _fine_grained(file, normalize=weights_norm(file), **options)
    attends = mixer(file, shared_rope(file, "half"), head_norm=True)
    return rms_decoder(file, attends, unless_dense(file, network), output="required")


def glm4moe(file: Reader) -> Description:
    """GLM 4.5 (arXiv 2508.06471): the norm before the experts is named post_attention_norm."""
    rope = with_sections(file, shared_rope(file, "half"), required=False)
    options: dict[str, Any] = {"scores": scoring(file, "sigmoid"), "choice_bias": "required"}
    network = _fine_grained(
        file, normalize=weights_norm(file), width=lambda i: divided_width(file, i), **options
    )
    attends = mixer(file, rope, head_norm=file.anywhere("attn_q_norm.weight"))
    second = "post_attention_norm"
    return rms_decoder(
        file,
        attends,
        unless_dense(file, network),
        norms=("attn_norm", second),
        nextn=NextnKind(rms_norm(file), passes_normed=True),
    )


def hy_v3(file: Reader) -> Description:
    """Hunyuan 3: layers without a router are dense."""
    scores, normalize, scale = scoring(file, "sigmoid"), weights_norm(file), weights_scale(file)

    def network(index: int) -> Dense | Mixture:
        if not file.has("ffn_gate_inp.weight", index):
            return plain_dense(file, index)
        width = divided_width(file, index)
        route = router(
            file,
            index,
            scores,
            normalize=normalize,
            scale=scale,
            choice_bias="optional",
            choice_name="exp_probs_b",
        )
        shared = shared_expert(file, index, shared_width(file, width))
        return mixture(file, index, route, width, shared=shared)

    attends = mixer(file, shared_rope(file, "half"), head_norm=True)
    nextn = NextnKind(rms_norm(file), passes_normed=True)
    description = rms_decoder(file, attends, network, nextn=nextn)
    return without(description, file, Mixture, DENSE)


def ernie(file: Reader) -> Description:
    """ERNIE 4.5: after the dense layers every interleave_moe_layer_step-th layer has experts.

    llama.cpp stores experts for the other layers too, but computes only silu(x') there.
    """
    leading, step = leading_dense(file), file.size("interleave_moe_layer_step")

    def network(index: int) -> Network:
        if index < leading:
            return plain_dense(file, index)
        if (index + 1) % step:
            return SILU
        route = router(file, index, normalize=True, choice_bias="optional")
        shared = shared_expert(file, index, shared_width(file, 0))
        width = expert_width(file, index)
        return mixture(file, index, route, width, shared=shared, gate="optional")

    attends = mixer(file, shared_rope(file, "interleaved"))
    description = rms_decoder(file, attends, network, unused=["attn_output.bias"])
    return without(description, file, Activation, EXPERTS)


def _fine_grained(
    file: Reader,
    *,
    normalize: bool,
    width: Callable[[int], int] | None = None,
    shared: int = 0,
    **options: Any,
) -> Callable[[int], Mixture]:
    """Experts, and a shared FFN of width ``shared`` (default: expert_shared_count experts);
    ``options`` go to `router`."""
    count, scale = shared_count(file), weights_scale(file)

    def build(index: int) -> Mixture:
        each = width(index) if width else expert_width(file, index)
        route = router(file, index, normalize=normalize, scale=scale, **options)
        beside = shared_expert(file, index, count * (shared or each))
        return mixture(file, index, route, each, shared=beside)

    return build


ARCHITECTURES = {
    "deepseek": deepseek,
    "deepseek2-ocr": deepseek_ocr,
    "bailingmoe": bailingmoe,
    "bailingmoe2": bailingmoe2,
    "dots1": dots1,
    "glm4moe": glm4moe,
    "hy_v3": hy_v3,
    "ernie4_5-moe": ernie,
}
