"""Granite (IBM) and MiniCPM (arXiv 2404.06395): LLaMA with scaled embedding, residuals and logits.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon, logit_scale (divides),
residual_scale, embedding_scale, attention.scale, those of `mixtures` and (not MiniCPM)
expert_shared_feed_forward_length; 0 counts as absent. llama.cpp: `src/models/` granite.cpp,
granite-moe.cpp, granite-swa.cpp, minicpm.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from urdir.model.families.attention import Attention
from urdir.model.families.dense import decoder
from urdir.model.families.description import Description
from urdir.model.families.mixtures import optional_mixture, shared_width
from urdir.model.families.parts import attention, head_dims, heads, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.windows import flagged_layers


def granite(file: Reader) -> Description:
    """Granite 3 and 4; without RoPE if rope.scaling.finetuned is false."""
    return _granite(file, file.optional("rope.scaling.finetuned", bool, True))


def granitemoe(file: Reader) -> Description:
    """Granite 3 with a mixture of experts."""
    return _granite(file, True)


def _granite(file: Reader, rotates: bool) -> Description:
    rope = read_rope(file, "interleaved", head_dims(file)[0])
    scale = file.optional("attention.scale", float, 0.0) or None

    def mixer(layer: int) -> Attention:
        return attention(file, layer, rope if rotates else None, scale=scale)

    return _scaled(file, mixer, file.number("logit_scale"), shared=shared_width(file, 0))


def granite_swa(file: Reader) -> Description:
    """Granite with sliding windows and attention sinks.

    Keys: attention.sliding_window, attention.sliding_window_pattern (a flag for each layer),
    attention.rope_pattern (layers with RoPE; ignored unless it is an array).
    """
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")
    layers, pattern = file.layer_count(), "attention.rope_pattern"
    rotates = file.by_layer(pattern, bool) if file.is_array(pattern) else [True] * layers
    rope = read_rope(file, "interleaved", head_dims(file)[0])
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


def minicpm(file: Reader) -> Description:
    """MiniCPM 1 and 2. Old files lack the scales; they follow from sizes as in llama.cpp, whose
    default of logit_scale is the inverse of the value in newer files."""
    rope = read_rope(file, "interleaved", head_dims(file)[0])
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
    return decoder(
        file,
        rms_norm(file),
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
    "minicpm": minicpm,
}
