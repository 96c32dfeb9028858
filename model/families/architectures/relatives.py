"""Decoders that differ from LLaMA's in a detail.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; each family lists its own.
llama.cpp: `src/models/` arcee.cpp, apertus.cpp, baichuan.cpp, ernie4-5.cpp, paddleocr.cpp,
exaone.cpp, hunyuan-vl.cpp, internlm2.cpp, maincoder.cpp, mistral3.cpp, pangu-embed.cpp, refact.cpp,
seed-oss.cpp, smollm3.cpp, xverse.cpp, cogvlm.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from urdir.model.families.dense import (
    mixer,
    plain_decoder,
    rms_decoder,
    shared_rope,
    without_experts,
)
from urdir.model.families.description import Description
from urdir.model.families.mixtures import EXPERTS, has_experts, optional_mixture
from urdir.model.families.parts import RELU2, SILU, dense, head_dims
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, with_sections
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.attention.own_token import Temperature
from urdir.ptxgen.kernels.rotation import RopeScaling

#: Tensors of llama.cpp's common layer that some families load without using them.
_BIASES = ("attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
#: QK norms follow RoPE.
_NORMED_AFTER_ROPE = {"head_norm": True, "after_rope": True}
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def arcee(file: Reader) -> Description:
    """Arcee AFM: ungated squared ReLU."""
    rope = shared_rope(file, "interleaved", factors=True)
    network = partial(dense, file, activation=RELU2, gated=False, bias="absent")
    return plain_decoder(file, rope, network=network)


def apertus(file: Reader) -> Description:
    """Apertus (arXiv 2509.14233): ungated xIELU (arXiv 2411.13010), QK norms.

    Keys: xielu.alpha_n, alpha_p, beta, eps (without the architecture's name, for all layers or
    each). Softplus is applied to stored alphas; beta is added to the negative one.
    """
    rope = shared_rope(file, "half", factors=True)
    keys = ("alpha_n", "alpha_p", "beta", "eps")
    stored = [file.global_by_layer(f"xielu.{name}", float) for name in keys]

    def network(layer: int) -> Any:
        alpha_n, alpha_p, beta, eps = (values[layer] for values in stored)
        parameters = (beta + _softplus(alpha_n), _softplus(alpha_p), beta, eps)
        activation = Activation("xielu", parameters=parameters)
        return dense(file, layer, activation, gated=False, bias="absent")

    attends = {"head_norm": True, "output_bias": "optional"}
    unused = ("attn_q_norm.bias", "attn_k_norm.bias")
    return plain_decoder(
        file, rope, attends=attends, network=network, output="required", unused=unused
    )


def _softplus(x: float) -> float:
    return x if x > 20.0 else math.log1p(math.exp(x))


def baichuan(file: Reader) -> Description:
    """Baichuan (arXiv 2309.10305): RoPE with 32 layers (7B), ALiBi with 40 (13B). Other layer
    counts have no positions in llama.cpp."""
    layers = file.layer_count()
    rope = shared_rope(file, "interleaved") if layers == 32 else None
    max_bias = 8.0 if layers == 40 else 0.0
    return plain_decoder(file, rope, attends={"max_bias": max_bias}, output="required")


def ernie4_5(file: Reader) -> Description:
    """ERNIE 4.5, dense. The bias of attention's output is ignored."""
    return plain_decoder(file, shared_rope(file, "interleaved"), unused=("attn_output.bias",))


def paddleocr(file: Reader) -> Description:
    """PaddleOCR-VL: ERNIE 4.5 with multi-axis positions."""
    rope = with_sections(file, shared_rope(file, "half"))
    return plain_decoder(file, rope, attends={"output_bias": "optional"})


def cogvlm(file: Reader) -> Description:
    """CogVLM (arXiv 2311.03079), its text: the matrices for pictures are unused. RoPE has
    a fixed base."""
    rope = RopeConfig(head_dims(file)[0], "half", 1e4, RopeScaling())
    pictures = (f"vis_{name}.weight" for name in ("attn_qkv", "attn_output", "gate", "up", "down"))
    return plain_decoder(file, rope, unused=(*pictures, "rope_freqs.weight"))


def exaone(file: Reader) -> Description:
    """EXAONE 3 (arXiv 2408.03541)."""
    return plain_decoder(file, shared_rope(file, "half", factors=True))


def hunyuan(file: Reader, *, axes: bool = False) -> Description:
    """Hunyuan, dense: QK norms follow RoPE.

    Keys: rope.scaling.alpha, NTK-aware scaling of the base. With ``axes`` (the text decoder of
    Hunyuan-VL) rope.dimension_sections.
    """
    without_experts(file, most=1)
    key_dim, rope = head_dims(file)[0], shared_rope(file, "half")
    alpha = file.optional("rope.scaling.alpha", float, 0.0)
    if alpha > 0.0:
        rope = replace(rope, freq_base=rope.freq_base * alpha ** (key_dim / (key_dim - 2)))
    if axes:
        rope = with_sections(file, rope, required=False)
    return plain_decoder(file, rope, attends=_NORMED_AFTER_ROPE)


def internlm2(file: Reader) -> Description:
    """InternLM 2 (arXiv 2403.17297)."""
    return plain_decoder(file, shared_rope(file, "interleaved"), output="required")


def maincoder(file: Reader) -> Description:
    """Maincoder: QK norms follow RoPE."""
    return plain_decoder(file, shared_rope(file, "interleaved"), attends=_NORMED_AFTER_ROPE)


def mistral3(file: Reader) -> Description:
    """Ministral 3 and Mistral Small 3: LLaMA with queries scaled by position.

    Key: attention.temperature_scale; the step is the original context length.
    """
    rope = shared_rope(file, "interleaved", factors=True)
    scale = file.optional("attention.temperature_scale", float, 0.0)
    length = file.own("temperature_length", int, rope.scaling.original_context)
    temperature = Temperature(scale, length) if scale else None
    return plain_decoder(
        file,
        rope,
        network=lambda layer: optional_mixture(file, layer),
        attends={"temperature": temperature, "output_bias": "optional"},
    )


def pangu(file: Reader) -> Description:
    """openPangu-Embedded: attention output has a bias. Frequency factors are ignored."""
    rope, attends = shared_rope(file, "half"), {"output_bias": "required"}
    return plain_decoder(file, rope, attends=attends, unused=_FACTORS)


def refact(file: Reader) -> Description:
    """Refact: ALiBi. Biases other than those of Q, K and V are ignored.

    llama.cpp loads experts if the file has any, but computes only silu(x') in their place.
    """
    has_any = has_experts(file)
    unused = (
        *(EXPERTS if has_any else ()),
        *_BIASES,
        "rope_freqs.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
    )
    network = (lambda layer: SILU) if has_any else None
    return plain_decoder(file, None, attends={"max_bias": 8.0}, network=network, unused=unused)


def seed_oss(file: Reader) -> Description:
    """Seed-OSS: the FFN norm is named post_attention_norm."""
    norms = ("attn_norm", "post_attention_norm")
    return plain_decoder(file, shared_rope(file, "half"), norms=norms)


def smollm3(file: Reader) -> Description:
    """SmolLM 3: every fourth layer has no RoPE (arXiv 2501.18795)."""
    rope = shared_rope(file, "interleaved")
    return rms_decoder(
        file,
        lambda layer: mixer(file, rope if (layer + 1) % 4 else None)(layer),
    )


ARCHITECTURES = {
    "arcee": arcee,
    "apertus": apertus,
    "baichuan": baichuan,
    "ernie4_5": ernie4_5,
    "paddleocr": paddleocr,
    "cogvlm": cogvlm,
    "exaone": exaone,
    "hunyuan-dense": hunyuan,
    "hunyuan_vl": partial(hunyuan, axes=True),
    "internlm2": internlm2,
    "maincoder": maincoder,
    "mistral3": mistral3,
    "pangu-embedded": pangu,
    "refact": refact,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "xverse": internlm2,
}
