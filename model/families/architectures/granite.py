"""Granite (IBM), MiniCPM (arXiv 2404.06395) and HyperCLOVA X: LLaMA with scaled embedding,
residuals and logits.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon, logit_scale (divides),
residual_scale, embedding_scale, attention.scale, those of `mixtures` and (not MiniCPM)
expert_shared_feed_forward_length; 0 counts as absent. llama.cpp: `src/models/` granite.cpp,
granite-moe.cpp, granite-swa.cpp, granite-switch.cpp, minicpm.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder, shared_rope, without_experts
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.mixtures import optional_mixture, shared_width
from urdir.model.families.parts import attention, heads
from urdir.model.families.reader import Reader
from urdir.model.families.switch import Switch, SwitchedMatrix
from urdir.model.families.windows import flagged_layers


def granite(file: Reader) -> Description:
    """Granite 3 and 4; without RoPE if rope.scaling.finetuned is false."""
    return _granite(file, file.optional("rope.scaling.finetuned", bool, True))


def granitemoe(file: Reader) -> Description:
    """Granite 3 with a mixture of experts."""
    return _granite(file, True)


def _granite(file: Reader, rotates: bool) -> Description:
    rope = shared_rope(file, "interleaved", factors=True)
    scale = file.optional("attention.scale", float, 0.0) or None

    def mixer(layer: int) -> Attention:
        return attention(file, layer, rope if rotates else None, scale=scale)

    return _scaled(file, mixer, file.number("logit_scale"), shared=shared_width(file, 0))


def hyperclovax(file: Reader) -> Description:
    """HyperCLOVA X SEED (NAVER, 2025): Granite with a logit_scale that multiplies, and with norms
    also after networks, whose weights include residual_scale. Folders only."""
    rope, has_norms = shared_rope(file, "half", factors=True), file.own("post_norms", bool, True)
    scale = file.optional("attention.scale", float, 0.0) or None
    residual = file.optional("residual_scale", float, 0.0) or 1.0
    return rms_decoder(
        file,
        lambda layer: attention(file, layer, rope, scale=scale),
        post_norms=("post_attention_norm", "post_ffw_norm") if has_norms else (None, None),
        scale=1.0 if has_norms else residual,
        embedding_scale=file.optional("embedding_scale", float, 0.0) or 1.0,
        logit_scale=file.number("logit_scale", 1.0),
    )


def granite_swa(file: Reader) -> Description:
    """Granite with sliding windows and attention sinks.

    Keys: attention.sliding_window, attention.sliding_window_pattern (a flag for each layer),
    attention.rope_pattern (layers with RoPE; ignored unless it is an array).
    """
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")
    layers, pattern = file.layer_count(), "attention.rope_pattern"
    rotates = file.by_layer(pattern, bool) if file.is_array(pattern) else [True] * layers
    rope = shared_rope(file, "interleaved", factors=True)
    scale = file.optional("attention.scale", float, 0.0) or None

    def mixer(layer: int) -> Attention:
        return attention(
            file,
            layer,
            rope if rotates[layer] else None,
            scale=scale,
            window=window if windowed[layer] else 0,
            sinks=file.vector("attn_sinks.weight", layer, heads(file, layer)[0]),
        )

    return _scaled(file, mixer, file.number("logit_scale"), shared=shared_width(file, 0))


def graniteswitch(file: Reader) -> Description:
    """Granite with adapters of its matrices in the file, which tokens of a text switch on.

    Keys: adapters.count, adapters.lora_rank, adapters.token_ids_activate and token_ids_substitute
    (a token for each adapter), adapters.router_gain (default: 15).
    """
    without_experts(file)
    found = granite(file)
    count, rank = file.size("adapters.count"), file.size("adapters.lora_rank")
    tokens, substitutes = (
        _tokens_of_adapters(file, f"adapters.token_ids_{of}", count, found.vocab_size)
        for of in ("activate", "substitute")
    )
    gain = file.amount("adapters.router_gain", 15.0)
    matrices = tuple(_switched_matrices(file, found, 1 + count, rank))
    switch = Switch(tokens, substitutes, gain, rank, matrices)
    room = switch.room("f16")
    return replace(found, switch=switch, adapters=room, ignored_keys=file.ignored_keys)


def _tokens_of_adapters(file: Reader, name: str, count: int, vocab: int) -> tuple[int, ...]:
    tokens = tuple(file.integers(name))
    if len(tokens) != count or not all(0 <= token < vocab for token in tokens):
        raise ConfigError(
            f"metadata key '{file.key(name)}': expected {count} tokens "
            f"({file.key('adapters.count')}) of a vocabulary of {vocab}"
        )
    return tokens


def _switched_matrices(
    file: Reader, found: Description, slots: int, rank: int
) -> Iterator[SwitchedMatrix]:
    """The low-rank matrices of all matrices of the layers."""
    for layer, (mixer, ffn) in enumerate(of.networks for of in found.layers):
        assert isinstance(mixer, Attention)
        assert isinstance(ffn, Dense)
        of_layer = {
            **{"attn_q": mixer.q, "attn_k": mixer.k, "attn_v": mixer.v, "attn_output": mixer.o},
            **{"ffn_gate": ffn.gate, "ffn_up": ffn.up, "ffn_down": ffn.down},
        }
        for name, linear in of_layer.items():
            if linear is not None:
                matrix, rows = linear.matrix, linear.rows
                a = file.vector(f"{name}.lora_a", layer, slots, rank, linear.cols)
                b = file.vector(f"{name}.lora_b", layer, slots, rows, rank)
                yield SwitchedMatrix(matrix.name, matrix.first, rows, a, b)


def minicpm(file: Reader) -> Description:
    """MiniCPM 1 and 2. Old files lack the scales; they follow from sizes as in llama.cpp, whose
    default of logit_scale is the inverse of the value in newer files."""
    rope = shared_rope(file, "interleaved", factors=True)
    return _scaled(
        file,
        lambda layer: attention(file, layer, rope),
        file.number("logit_scale", 256.0 / file.hidden),
        residual=1.4 / math.sqrt(file.layer_count()),
        embedding=12.0,
    )


def _scaled(
    file: Reader,
    mixer: Callable[[int], Attention],
    logit_divisor: float,
    *,
    shared: int = 0,
    residual: float = 0.0,
    embedding: float = 0.0,
) -> Description:
    return rms_decoder(
        file,
        mixer,
        lambda layer: optional_mixture(file, layer, shared),
        scale=file.optional("residual_scale", float, residual) or 1.0,
        embedding_scale=file.optional("embedding_scale", float, embedding) or 1.0,
        logit_scale=1.0 / logit_divisor,
    )


ARCHITECTURES = {
    "granite": granite,
    "granitemoe": granitemoe,
    "granite_swa": granite_swa,
    "graniteswitch": graniteswitch,
    "hyperclovax": hyperclovax,
    "minicpm": minicpm,
}
