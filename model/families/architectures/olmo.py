"""OLMo 1 to 3 (arXiv 2402.00838, 2501.00656), FlexOlmo and EXAONE 4 (arXiv 2507.11407).

All but OLMo 1 have norms after attention and FFN only.

Keys: those of `parts` and `rope`; OLMo: attention.layer_norm_epsilon, attention.clamp_kqv (0:
none); the others: attention.layer_norm_rms_epsilon, attention.sliding_window,
attention.sliding_window_pattern. llama.cpp: `src/models/` olmo.cpp, olmo2.cpp, exaone4.cpp.
"""

from __future__ import annotations

from typing import Any

from urdir.model.families.attention import Attention
from urdir.model.families.dense import (
    decoder,
    mixer,
    rms_decoder,
    shared_rope,
    weightless,
    windowed_mixer,
)
from urdir.model.families.description import Description
from urdir.model.families.mixtures import dense_width, mixture, router
from urdir.model.families.parts import attention, head_dims, layer_norm, rms_norm, row_norms
from urdir.model.families.reader import Reader
from urdir.model.families.rope import unscaled_rope
from urdir.model.families.windows import optional_window, optional_windows, windowed_layers

_POST_NORMS = ("post_attention_norm", "post_ffw_norm")


def olmo(file: Reader) -> Description:
    """OLMo 1: LayerNorm without weights; queries, keys and values are clamped."""
    norm = layer_norm(file)
    rope = shared_rope(file, "interleaved")
    clamp = max(0.0, file.optional("attention.clamp_kqv", float, 0.0))
    return decoder(
        file,
        norm,
        mixer(file, rope, clamp=clamp),
        norms=(weightless(norm), weightless(norm)),
        output_norm=weightless(norm),
    )


def olmo2(file: Reader) -> Description:
    """OLMo 2 and 3: one norm over all query heads, one over all key heads. OLMo 3: three of four
    layers use a sliding window and RoPE without context extension."""
    norm, rope = rms_norm(file), shared_rope(file, "half")
    local = unscaled_rope(file, rope, head_dims(file)[0])
    window = optional_window(file)
    windowed = optional_windows(file, window, 4)

    def norms(layer: int) -> dict[str, Any]:
        return {"qk_norm": row_norms(file, layer, norm)}

    return decoder(
        file,
        norm,
        windowed_mixer(file, windowed, window, local, rope, more=norms),
        norms=(None, None),
        post_norms=_POST_NORMS,
        output="required",
    )


def flex_olmo(file: Reader) -> Description:
    """FlexOlmo (arXiv 2507.07024): OLMo 2 with experts. Folders only."""
    norm, rope = rms_norm(file), shared_rope(file, "half")

    def attends(layer: int) -> Attention:
        norms = row_norms(file, layer, norm)
        return attention(file, layer, rope, qk_norm=norms, output_bias="absent")

    return rms_decoder(
        file,
        attends,
        lambda layer: mixture(file, layer, router(file, layer), dense_width(file, layer)),
        norms=(None, None),
        post_norms=_POST_NORMS,
        output="required",
    )


def exaone4(file: Reader) -> Description:
    """EXAONE 4: QK norms. With 64 layers (32B) three of four use a sliding window (default 4096),
    and only those have RoPE."""
    rope = shared_rope(file, "half", factors=True)
    attends = mixer(file, rope, head_norm=True)
    if file.layer_count() == 64 or file.own("has_windows", bool, False):
        windowed, window = windowed_layers(file, 4), file.size("attention.sliding_window", 4096)
        attends = windowed_mixer(file, windowed, window, rope, None, head_norm=True)
    return rms_decoder(
        file,
        attends,
        norms=(None, None),
        post_norms=_POST_NORMS,
    )


ARCHITECTURES = {"olmo": olmo, "olmo2": olmo2, "exaone4": exaone4, "flex-olmo": flex_olmo}
