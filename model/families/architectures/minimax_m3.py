"""MiniMax M3: heads with norms, experts as in DeepSeek V3 (arXiv 2412.19437) with the activation of
gpt-oss, and sparse attention. llama.cpp: `src/models/` minimax-m3.cpp.

In layers with experts a row attends to the attention.indexer.top_k blocks of
attention.indexer.block_size tokens that an index of their own finds best. Sequences of no more than
these have all of them: only such contexts are taken, and the tensors of the index are not used.

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon; the two above;
expert_feed_forward_length, expert_shared_count, expert_gating_func, expert_weights_norm,
expert_weights_scale, leading_dense_block_count.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.families.dense import mixer, rms_decoder, turning
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.mixtures import expert_width, leading_dense, plain_dense, shared_count
from urdir.model.families.reader import Reader
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.activation import Activation

SWIGLU_OAI = Activation("swiglu_oai", 7.0)
_INDEX = tuple(f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))


def minimax_m3(file: Reader) -> Description:
    """All of its layers as they are for contexts of a few blocks."""

    def network(index: int) -> Dense | Mixture:
        if index < leading_dense(file):
            return plain_dense(file, index, SWIGLU_OAI)
        beside = shared_count(file) * expert_width(file, index)
        return scored_experts(file, index, beside, SWIGLU_OAI)

    attends = mixer(file, turning(file, "half"), head_norm=True)
    description = rms_decoder(file, attends, network, output="required", unused=_INDEX)
    blocks, size = (file.size(f"attention.indexer.{name}") for name in ("top_k", "block_size"))
    return replace(
        description,
        context_length=min(description.context_length, blocks * size),
        ignored_keys=file.ignored_keys,
    )


ARCHITECTURES = {"minimax-m3": minimax_m3}
