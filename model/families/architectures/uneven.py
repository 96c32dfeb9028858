"""Decoders whose layers differ in width: Deci, Nemotron from Puzzle's search, and OpenELM.

arXiv 2411.19146 (Puzzle), 2404.14619 (OpenELM). Keys: those of `parts` (head counts and widths for
each layer) and `rope`, attention.layer_norm_rms_epsilon. llama.cpp: `src/models/` deci.cpp,
openelm.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from urdir.model.families.dense import plain_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.parts import attention, dense, model, rms_norm
from urdir.model.families.reader import Reader


def deci(file: Reader) -> Description:
    """DeciLM, Llama-3.1-Nemotron: LLaMA, some of whose layers lack attention.

    Layers without heads have no attention. Layers without KV heads have one matrix, attn_output,
    instead. A layer without an FFN (feed_forward_length 0) does nothing, as in llama.cpp: its
    attention is ignored.
    """
    norm = rms_norm(file)
    rope = shared_rope(file, "interleaved", factors=True)
    queries = file.by_layer("attention.head_count", int)
    keys = [file.by_layer("attention.head_count_kv", int, n)[i] for i, n in enumerate(queries)]
    widths = file.by_layer("feed_forward_length", int)

    def blocks(index: int) -> Iterator[Block]:
        if queries[index]:
            mixer: Network
            if keys[index]:
                mixer = attention(file, index, rope)
            else:
                mixer = file.linear("attn_output", index, file.hidden, file.hidden)
            yield Block((Branch(mixer, file.norm("attn_norm", index, norm)),))
        yield Block((Branch(dense(file, index), file.norm("ffn_norm", index, norm)),))

    def unused() -> Iterator[str]:
        for index, width in enumerate(widths):
            if not width:
                yield from file.of_layer(index)
            elif not keys[index] and file.has("attn_output.bias", index):
                yield f"blk.{index}.attn_output.bias"

    layers = [LayerConfig(tuple(blocks(index))) for index, width in enumerate(widths) if width]
    description = model(file, layers, file.norm("output_norm", None, norm))
    return replace(description, unused_tensors=(*description.unused_tensors, *unused()))


def openelm(file: Reader) -> Description:
    """OpenELM: QK norms, head counts and widths that grow from layer to layer; tied embeddings."""
    attends = {"head_norm": True, "qkv_bias": "absent"}
    return plain_decoder(file, shared_rope(file, "half"), attends=attends, output="absent")


ARCHITECTURES = {"deci": deci, "openelm": openelm}
