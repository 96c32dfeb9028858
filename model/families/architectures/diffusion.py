"""Decoders that fill masked tokens: Dream (arXiv 2508.15487), LLaDA (2502.09992), its mixture, and
RND1. Every token attends to all of the text; the layers are those of Qwen 2, Llama, OLMoE with
norms of heads, and Qwen 3's mixture. `engine.diffusion` has the loop that fills the masks.

Keys: those of `parts`, `rope` and `mixtures`; expert_feed_forward_length (default:
feed_forward_length divided by the number of used experts), expert_weights_scale (LLaDA).
llama.cpp: `src/models/` dream.cpp, llada.cpp, llada-moe.cpp, rnd1.cpp.
"""

from __future__ import annotations

from urdir.model.families.dense import mixer, rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.mixtures import divided_width, mixture, router, weights_scale
from urdir.model.families.parts import dense
from urdir.model.families.reader import Reader
from urdir.ptxgen.kernels.rotation import RopeStyle


def dream(file: Reader) -> Description:
    """Dream: Qwen 2, whose logits are those of the next token."""
    return _dense(file, "half")


def llada(file: Reader) -> Description:
    """LLaDA: neighbours rotate together."""
    return _dense(file, "interleaved")


def llada_moe(file: Reader) -> Description:
    """LLaDA's mixture: the weights of experts do not sum to 1."""
    return _experts(file, normalize=False, scale=weights_scale(file), output="required")


def rnd1(file: Reader) -> Description:
    """RND1: the weights of experts sum to 1."""
    return _experts(file, normalize=True)


def _dense(file: Reader, style: RopeStyle) -> Description:
    return rms_decoder(
        file,
        mixer(file, shared_rope(file, style, factors=True), causal=False, output_bias="optional"),
        lambda layer: dense(file, layer),
        causal=False,
        diffuses=True,
    )


def _experts(
    file: Reader, *, normalize: bool, scale: float = 1.0, output: str = "optional"
) -> Description:
    return rms_decoder(
        file,
        mixer(file, shared_rope(file, "half"), head_norm=True, causal=False),
        lambda layer: mixture(
            file,
            layer,
            router(file, layer, normalize=normalize, scale=scale),
            divided_width(file, layer),
        ),
        output=output,
        causal=False,
        diffuses=True,
    )


ARCHITECTURES = {"dream": dream, "llada": llada, "llada-moe": llada_moe, "rnd1": rnd1}
