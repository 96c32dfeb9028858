"""Gemma 1 to 3 (arXiv 2403.08295, 2408.00118, 2503.19786): GELU gates, tied scaled embedding.

The embedding is multiplied by sqrt(hidden). Stored norm weights include the 1 of (1 + weight).
Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; Gemma 2 and 3:
attention.sliding_window, attention.sliding_window_pattern, rope.freq_base_swa,
rope.dimension_count_swa, final_logit_softcapping; Gemma 2: attn_logit_softcapping.
llama.cpp: `src/models/` gemma.cpp, gemma2.cpp, gemma3.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from urdir.model.families.attention import Attention
from urdir.model.families.dense import Pair, mixer, rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.parts import GELU, dense, head_dims
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import optional_window, optional_windows, windowed_layers

_POST_NORMS = ("post_attention_norm", "post_ffw_norm")


def gemma(file: Reader) -> Description:
    """Gemma 1."""
    rope, scale = shared_rope(file, "half"), 1.0 / math.sqrt(head_dims(file)[1])
    return _decoder(file, mixer(file, rope, scale=scale), output="absent")


def gemma2(file: Reader, post_norms: Pair = _POST_NORMS) -> Description:
    """Gemma 2: a sliding window in every second layer; soft-capped scores and logits. VaultGemma
    (arXiv 2510.15001) has no norms after networks; folders only."""
    key_dim, _ = head_dims(file)
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, key_dim, scaled=True)
    windowed = windowed_layers(file, 2)
    window = file.size("attention.sliding_window", 4096)
    scale = _scale(file, largest=46)
    softcap = file.number("attn_logit_softcapping", 50.0)
    return _decoder(
        file,
        windowed_mixer(file, windowed, window, local, rope, scale=scale, softcap=softcap),
        post_norms=post_norms,
        output="absent",
        softcap=file.number("final_logit_softcapping", 30.0),
    )


def gemma3(file: Reader) -> Description:
    """Gemma 3: QK norms; five of six layers use a sliding window and their own RoPE base."""
    key_dim, window = head_dims(file)[0], optional_window(file)
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, key_dim, scaled=False, base=1e4) if window else rope
    windowed, scale = optional_windows(file, window, 6), _scale(file, largest=62)
    return _decoder(
        file,
        windowed_mixer(file, windowed, window, local, rope, scale=scale, head_norm=True),
        post_norms=_POST_NORMS,
        softcap=file.amount("final_logit_softcapping"),
        unused=("dense_2.weight", "dense_3.weight"),
    )


def _scale(file: Reader, largest: int) -> float:
    """The scale of attention scores: the largest model, known by its layer count, divides by
    sqrt(hidden / heads)."""
    if file.layer_count() == largest:
        return 1.0 / math.sqrt(file.hidden // file.size_at("attention.head_count", 0))
    return 1.0 / math.sqrt(head_dims(file)[0])


def _decoder(file: Reader, attends: Callable[[int], Attention], **options: Any) -> Description:
    return rms_decoder(
        file,
        attends,
        lambda layer: dense(file, layer, GELU, bias="absent"),
        embedding_scale=math.sqrt(file.hidden),
        **options,
    )


ARCHITECTURES = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "vaultgemma": partial(gemma2, post_norms=(None, None)),
}
