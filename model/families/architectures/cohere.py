"""Command R and Command A (Cohere): attention and FFN in parallel, tied embeddings.

Both branches read one LayerNorm without bias. Keys: those of `parts` and `rope`,
attention.layer_norm_epsilon, logit_scale (0: none); cohere2: attention.sliding_window,
attention.sliding_window_pattern. llama.cpp: `src/models/` command-r.cpp, cohere2.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.parts import attention, head_dims, heads, layer_norm
from urdir.model.families.reader import Reader
from urdir.model.families.windows import windowed_layers


def command_r(file: Reader) -> Description:
    """Command R; from 64 layers on, every query and key head has its own norm weights."""
    norm, (key_dim, _) = layer_norm(file), head_dims(file)
    rope = shared_rope(file, "interleaved")
    has_norms = file.layer_count() >= 64

    def mixer(layer: int) -> Attention:
        queries, keys = heads(file, layer)
        norms = QkNorm(
            file.norm("attn_q_norm", layer, norm, queries, key_dim),
            file.norm("attn_k_norm", layer, norm, keys, key_dim),
        )
        return attention(
            file, layer, rope, qk_norm=norms if has_norms else None, output_bias="absent"
        )

    return _decoder(file, mixer, file.optional("logit_scale", float, 0.0))


def cohere2(file: Reader) -> Description:
    """Command R7B and Command A: three of four layers use a sliding window; only those have
    RoPE."""
    rope = shared_rope(file, "interleaved")
    windowed, window = windowed_layers(file, 4), file.size("attention.sliding_window")
    attends = windowed_mixer(file, windowed, window, rope, None)
    return _decoder(file, attends, file.number("logit_scale"))


def _decoder(file: Reader, mixer: Callable[[int], Attention], scale: float) -> Description:
    return decoder(
        file,
        layer_norm(file),
        mixer,
        norms=("attn_norm", "attn_norm"),
        side_by_side=True,
        output="absent",
        logit_scale=scale or 1.0,
    )


ARCHITECTURES = {"command-r": command_r, "cohere2": cohere2}
