"""MiniMax M3: QK norms, experts as in DeepSeek V3, block-sparse attention.

The experts (arXiv 2412.19437) use the activation of gpt-oss. llama.cpp: `src/models/`
minimax-m3.cpp.

In layers with experts a row attends to the attention.indexer.top_k blocks of
attention.indexer.block_size tokens that an indexer scores highest. Shorter sequences attend to
every block: only contexts of that length are supported, and the indexer's tensors are unused.

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon; the two above;
expert_feed_forward_length, expert_shared_count, expert_gating_func, expert_weights_norm,
expert_weights_scale, leading_dense_block_count.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.families.dense import mixer, rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.mixtures import leading_dense, plain_dense
from urdir.model.families.reader import Reader
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.activation import Activation

SWIGLU_OAI = Activation("swiglu_oai", 7.0)
_INDEX = tuple(f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))


def minimax_m3(file: Reader) -> Description:
    """MiniMax M3 for contexts short enough that attention is not sparse."""

    def network(index: int) -> Dense | Mixture:
        if index < leading_dense(file):
            return plain_dense(file, index, SWIGLU_OAI)
        return scored_experts(file, index, activation=SWIGLU_OAI)

    attends = mixer(file, shared_rope(file, "half"), head_norm=True)
    description = rms_decoder(file, attends, network, output="required", unused=_INDEX)
    blocks, size = (file.size(f"attention.indexer.{name}") for name in ("top_k", "block_size"))
    return replace(
        description,
        context_length=min(description.context_length, blocks * size),
        ignored_keys=file.ignored_keys,
    )


ARCHITECTURES = {"minimax-m3": minimax_m3}
