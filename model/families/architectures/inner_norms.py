"""Decoders with further norms: BitNet within its networks, Chameleon after them.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; swin_norm (Chameleon).
llama.cpp: `src/models/` bitnet.cpp, chameleon.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.parts import (
    RELU2,
    SILU,
    attention,
    dense,
    head_dims,
    heads,
    model,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Presence, Reader
from urdir.ptxgen.kernels.norm import Norm

#: Chameleon's tokens of pictures.
_PICTURES = (4, 8196)
#: Chameleon's norms of heads; no key has their epsilon.
_HEADS = Norm("layer", 1e-5)


def bitnet(file: Reader) -> Description:
    """BitNet b1.58 (arXiv 2402.17764): a norm of all heads' results and one of the inner values;
    products may have a factor, NAME.scale. A folder may have squared ReLUs and an output matrix."""
    norm, rope = rms_norm(file), shared_rope(file, "half")
    activation = RELU2 if file.own("squared_relu", bool, False) else SILU

    def scaled(network: Any, layer: int, **names: str) -> dict[str, Any]:
        """The matrices of a network, by field, with the factors of those names."""
        return {
            field: replace(getattr(network, field), factor=file.vector(f"{name}.scale", layer, 1))
            for field, name in names.items()
            if file.anywhere(f"{name}.scale")
        }

    def mixer(layer: int) -> Attention:
        of = attention(file, layer, rope, qkv_bias="absent", output_bias="absent")
        own = scaled(of, layer, q="attn_q", k="attn_k", v="attn_v", o="attn_output")
        return replace(of, norm=file.norm("attn_sub_norm", layer, norm, of.output_width), **own)

    def network(layer: int) -> Dense:
        of = dense(file, layer, activation, bias="absent")
        own = scaled(of, layer, up="ffn_up", gate="ffn_gate", down="ffn_down")
        return replace(of, norm=file.norm("ffn_sub_norm", layer, norm, of.width), **own)

    output: Presence = "optional" if file.of_folder else "absent"
    return rms_decoder(file, mixer, network, output=output, output_bias="absent")


def chameleon(file: Reader) -> Description:
    """Chameleon (arXiv 2405.09818), its text: a LayerNorm for every head; tokens of pictures are
    never chosen. Larger models have ``swin_norm``: norms after the networks. Their FFN reads what
    attention adds, without the stream, in llama.cpp; in a folder it reads the stream, as in
    transformers."""
    rope, (key_dim, _) = shared_rope(file, "interleaved"), head_dims(file)
    norm, swin = rms_norm(file), file.optional("swin_norm", bool, False)

    def mixer(layer: int) -> Attention:
        q, k = (
            file.norm(f"attn_{name}_norm", layer, _HEADS, count, key_dim, bias="optional")
            for name, count in zip("qk", heads(file, layer), strict=True)
        )
        return attention(file, layer, rope, qk_norm=QkNorm(q, k), output_bias="absent")

    def layer(index: int) -> LayerConfig:
        networks = mixer(index), dense(file, index, bias="absent")
        norms = file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)
        if not swin:
            return sequential(*networks, norms)
        if file.of_folder:
            return sequential(*networks, (None, None), norms)
        first = Branch(networks[0], post_norm=norms[0])
        second = Branch(networks[1], post_norm=norms[1], reads_sibling=True)
        return LayerConfig((Block((first, second)),))

    of = model(file, layer, file.norm("output_norm", None, norm), output_bias="absent")
    if of.vocab_size < _PICTURES[1]:
        raise ConfigError(
            f"tensor 'token_embd.weight' has {of.vocab_size} rows, fewer than the tokens of "
            f"pictures, which end before {_PICTURES[1]}"
        )
    return replace(of, hides=_PICTURES)


ARCHITECTURES = {"bitnet": bitnet, "chameleon": chameleon}
