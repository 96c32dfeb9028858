"""Zamba 2 (arXiv 2411.15242): Mamba-2 mixers, some of which read the stream and what a transformer
makes of it and of the embedding. A few transformers take turns; each use has matrices of low rank
beside the shared ones.

    x += mamba(norm(x + linear ffn(norm(attention(norm([x ; e]))))))

Folders alone. Keys: those of `state_space` and `rope`; attention.head_count_kv (0: no transformer
before the layer), own.blocks (transformers), own.adapter_rank, own.attention_adapters,
own.mem_rope. transformers: modeling_zamba2.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures.state_space import mamba2_mixer
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig, SharedTransformer
from urdir.model.families.parts import gelu, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.stored import Linear, LowRankTerm


def zamba2(file: Reader) -> Description:
    """Zamba 2."""
    if not file.of_folder:
        raise UnsupportedError("zamba2 in a GGUF file: no converter writes them")
    norm, blocks = rms_norm(file), file.own("blocks", int, 1)
    kv_heads = file.by_layer("attention.head_count_kv", int)
    users = [layer for layer, count in enumerate(kv_heads) if count]
    if blocks < 1:
        raise ConfigError(f"{file.key('own.blocks')} is {blocks}, expected a positive number")

    def layer(index: int) -> LayerConfig:
        mixer = Branch(mamba2_mixer(file, index, norm), file.norm("attn_norm", index, norm))
        block = Block((mixer,))
        if index in users:
            number = users.index(index)
            shared = _transformer(file, index, users[number % blocks], number)
            block = replace(block, transformer=shared)
        return LayerConfig((block,))

    return model(file, layer, file.norm("output_norm", None, norm), saves="embedding")


def _transformer(file: Reader, layer: int, stored: int, number: int) -> SharedTransformer:
    """The transformer before a layer, whose weights layer ``stored`` has; its use ``number``."""
    norm, hidden = rms_norm(file), file.hidden
    heads = file.size("attention.head_count")
    kv_heads = file.size_at("attention.head_count_kv", layer)
    dim, rank = file.size("attention.key_length"), file.own("adapter_rank", int, 0)
    width = file.size("feed_forward_length")

    def matrix(name: str, rows: int, cols: int) -> Linear:
        return file.linear(name, stored, rows, cols)

    def adapted(of: Linear, first: int, rows: int, name: str) -> Linear:
        """The rows of a matrix from ``first`` on, with those of its adapter."""
        part = of.part(first, rows)
        adapter = f"{name}_adapter.{number}"
        if rank < 1:
            raise ConfigError(f"{file.key('own.adapter_rank')} is {rank}")
        low = LowRankTerm(
            file.matrix(f"{adapter}.a", stored, rank, of.cols),
            file.matrix(f"{adapter}.b", stored, of.rows, rank).part(first, rows),
        )
        return replace(part, low=low)

    heads_of = {"q": heads, "k": kv_heads, "v": kv_heads}
    products = {n: matrix(f"attn_{n}", count * dim, 2 * hidden) for n, count in heads_of.items()}
    if file.own("attention_adapters", bool, False):
        products = {n: adapted(of, 0, of.rows, f"attn_{n}") for n, of in products.items()}
    rope = read_rope(file, "half", dim)
    both = matrix("ffn_up", 2 * width, hidden)
    return SharedTransformer(
        Attention(
            heads=heads,
            kv_heads=kv_heads,
            key_dim=dim,
            value_dim=dim,
            scale=1.0 / math.sqrt(dim / 2),
            o=matrix("attn_output", hidden, heads * dim),
            rope=rope if file.own("mem_rope", bool, False) else None,
            q=products["q"],
            k=products["k"],
            v=products["v"],
        ),
        file.norm("attn_norm_2", stored, norm, 2 * hidden),
        Dense(
            adapted(both, width, width, "ffn_up"),
            matrix("ffn_down", hidden, width),
            adapted(both, 0, width, "ffn_up"),
            gelu(file),
        ),
        file.norm("ffn_norm", stored, norm),
        file.linear("ffn_linear", layer, hidden, hidden),
    )


ARCHITECTURES = {"zamba2": zamba2}
