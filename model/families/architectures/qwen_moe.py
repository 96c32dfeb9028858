"""Qwen's mixtures of experts and relatives: OLMoE, MiniMax-M2, Hunyuan-A13B, Grove MoE.

llama.cpp: `src/models/` qwen2moe.cpp, qwen3moe.cpp, qwen3vlmoe.cpp, olmoe.cpp, minimax-m2.cpp,
hunyuan-moe.cpp, grovemoe.cpp.

Keys: those of `parts`, `rope` and `mixtures`: expert_feed_forward_length (default:
feed_forward_length divided by the number of used experts; OLMoE, MiniMax and Hunyuan read
feed_forward_length instead), expert_shared_feed_forward_length (Qwen 2, Hunyuan),
expert_gating_func (MiniMax), rope.dimension_sections (Qwen 3 VL), expert_group_scale,
experts_per_group, expert_chunk_feed_forward_length (Grove MoE).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.architectures.gated_delta import gated_experts
from urdir.model.families.attention import Attention
from urdir.model.families.dense import mixer, rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.mixtures import (
    dense_width,
    divided_width,
    expert_width,
    mixture,
    router,
    scoring,
    shared_expert,
    shared_width,
)
from urdir.model.families.parts import attention, head_dims, rms_norm, row_norms
from urdir.model.families.parts import required_head_norms as head_norms
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, with_sections


def qwen2moe(file: Reader) -> Description:
    """Qwen 1.5 and 2 (arXiv 2407.10671): a shared expert with its own gate."""

    network = gated_experts(file, normalize=False)
    return rms_decoder(file, mixer(file, shared_rope(file, "half")), network, output="required")


def qwen3moe(file: Reader) -> Description:
    """Qwen 3 (arXiv 2505.09388): QK norms; expert weights sum to 1."""
    return _qwen3(file, shared_rope(file, "half"))


def qwen3vlmoe(file: Reader) -> Description:
    """The text decoder of Qwen 3 VL (arXiv 2511.21631)."""
    return _qwen3(file, with_sections(file, shared_rope(file, "half"), interleaved=True))


def _qwen3(file: Reader, rope: RopeConfig) -> Description:
    def network(index: int) -> Mixture:
        return mixture(file, index, router(file, index, normalize=True), divided_width(file, index))

    return rms_decoder(file, mixer(file, rope, head_norm=True), network)


def grovemoe(file: Reader) -> Description:
    """Grove MoE (arXiv 2508.07785): Qwen 3, and smaller experts that every few neighbours share,
    which read the sum of the others."""
    scale, shares = file.required("expert_group_scale", float), file.size("experts_per_group")
    if file.size("expert_count") % shares:
        raise ConfigError(
            f"{file.key('experts_per_group')} is {shares} of {file.size('expert_count')} experts"
        )

    def network(index: int) -> Mixture:
        route = router(file, index, normalize=True)
        width = expert_width(file, index, dense_width(file, index) // route.used)
        used = min(route.used, route.experts // shares)
        smaller = file.count("expert_chunk_feed_forward_length") or head_dims(file)[0]
        few = replace(route, used=used, shares=shares)
        chunks = mixture(file, index, few, smaller, suffix="_chexps")
        return replace(mixture(file, index, route, width), chunks=chunks, chunk_scale=scale)

    return rms_decoder(file, mixer(file, shared_rope(file, "half"), head_norm=True), network)


def olmoe(file: Reader) -> Description:
    """OLMoE (arXiv 2409.02060): one norm over all query heads, one over all key heads."""

    def network(index: int) -> Mixture:
        return mixture(file, index, router(file, index), dense_width(file, index))

    return rms_decoder(file, _row_normed(file), network, output="required")


def minimax_m2(file: Reader) -> Description:
    """MiniMax-M2: OLMoE's attention; a selection bias."""
    scores = scoring(file)

    def network(index: int) -> Mixture:
        route = router(file, index, scores, normalize=True, choice_bias="required")
        return mixture(file, index, route, dense_width(file, index))

    return rms_decoder(file, _row_normed(file), network, output="required")


def _row_normed(file: Reader) -> Callable[[int], Attention]:
    norm, rope = rms_norm(file), shared_rope(file, "half")

    def build(index: int) -> Attention:
        norms = row_norms(file, index, norm)
        return attention(file, index, rope, qk_norm=norms, output_bias="absent")

    return build


def hunyuan_moe(file: Reader) -> Description:
    """Hunyuan-A13B: a shared expert; QK norms follow RoPE."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    rope = shared_rope(file, "half")

    def attends(index: int) -> Attention:
        norms = head_norms(file, index, norm, key_dim, after_rope=True)
        return attention(file, index, rope, qk_norm=norms, output_bias="absent")

    def network(index: int) -> Mixture:
        width = dense_width(file, index)
        return mixture(
            file,
            index,
            router(file, index, normalize=True),
            width,
            shared=shared_expert(file, index, shared_width(file, width)),
        )

    return rms_decoder(file, attends, network)


ARCHITECTURES = {
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "qwen3vlmoe": qwen3vlmoe,
    "olmoe": olmoe,
    "minimax-m2": minimax_m2,
    "hunyuan-moe": hunyuan_moe,
    "grovemoe": grovemoe,
}
