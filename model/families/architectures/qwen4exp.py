"""Qwen 4 (qwen4exp): Qwen 3.5's layers with four streams, attention to pools of tokens that an
indexer selects, and a memory of n-grams.

The streams are read and written by gates of low rank, which take the place of norms of layers. The
indexer scores means of keys; gates of the delta rule's results are sigmoids.

Keys: those of `gated_delta`, `hyper` and `ngrams`; attention.indexer.head_count, key_length, top_k;
attention.compress_ratios (tokens of a pool for each layer, 0: attention to all tokens).
llama.cpp: `src/models/` qwen4exp.cpp. It selects top_k + ratio - 1 tokens of every row, and where
the last tokens that are no pool are fewer than ratio - 1, part of one more pool, whichever its
sorting leaves. Here as many whole pools as top_k has, and the last tokens, are selected.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures.deepseek32 import check_indexer
from urdir.model.families.architectures.gated_delta import (
    delta_net,
    gated_attention,
    gated_experts,
    recurrent_layers,
)
from urdir.model.families.attention import Attention, Indexer
from urdir.model.families.dense import shared_rope
from urdir.model.families.description import Description
from urdir.model.families.hyper import low_rank, with_low_rank
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.ngrams import ngram_layer, ngram_memory
from urdir.model.families.parts import model, rms_norm, sequential
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, with_sections
from urdir.ptxgen.kernels.attention.pool_keys import MOST_POOL

#: Tensors of an indexer, which llama.cpp also loads for layers that attend to all tokens.
_INDEXER = tuple(f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))


def qwen4exp(file: Reader) -> Description:
    """Qwen 4, text only."""
    rope = with_sections(file, shared_rope(file, "half"), interleaved=True)
    recurrent, ratios = recurrent_layers(file), file.by_layer("attention.compress_ratios", int, 0)
    experts, memory = gated_experts(file), ngram_layer(file)
    if memory is not None and not recurrent[memory]:
        raise ConfigError(f"{file.key('ple.layers')}: layer {memory} has attention, and no state")

    def mixer(index: int) -> Network:
        if recurrent[index]:
            of = delta_net(file, index)
            return of if file.own("silu_gates", bool, False) else replace(of, gating="sigmoid")
        return _attention(file, index, rope, ratios[index])

    def layer(index: int) -> LayerConfig:
        of = sequential(mixer(index), experts(index), (None, None))
        blocks = with_low_rank(file, index, of.blocks)
        if index == memory:
            blocks = (Block((Branch(ngram_memory(file, index)),)), *blocks)
        return replace(of, blocks=blocks)

    found = model(file, layer, None, join=low_rank(file, "output_hc", None))
    idle = (index for index, ratio in enumerate(ratios) if not (ratio or recurrent[index]))
    unused = (f"blk.{index}.{name}" for index in idle for name in _INDEXER)
    known = (name for name in unused if name in file.stored)
    return replace(found, unused_tensors=(*found.unused_tensors, *known))


def _attention(file: Reader, layer: int, rope: RopeConfig, ratio: int) -> Attention:
    of = gated_attention(file, layer, rope)
    if not ratio:
        return of
    heads, dim, most = check_indexer(file, rope)
    if not 1 < ratio <= MOST_POOL or most % ratio or rope.dim % 16:
        raise UnsupportedError(
            f"{file.key('attention.compress_ratios')} is {ratio} for layer {layer}: supported are "
            f"2 to {MOST_POOL} tokens, of which attention.indexer.top_k ({most}) is a multiple, "
            f"with keys of which a multiple of 16 values rotates ({rope.dim})"
        )
    norm, hidden = rms_norm(file), file.hidden
    indexer = Indexer(
        heads,
        dim,
        most,
        q=file.linear("indexer.q_proj", layer, heads * dim, hidden),
        k=file.linear("indexer.k_proj", layer, dim, hidden),
        k_norm=file.norm("indexer.k_norm", layer, norm, dim),
        weights=None,
        rope=rope,
        pool=ratio,
        q_norm=file.norm("indexer.q_norm", layer, norm, dim),
        # llama.cpp rotates all pairs of these keys
        pool_rope=replace(rope, still=()),
    )
    return replace(of, indexer=indexer)


ARCHITECTURES = {"qwen4exp": qwen4exp}
