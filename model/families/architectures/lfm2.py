"""LFM2 and LFM3 (Liquid AI), dense and with experts: gated short convolutions, attention in some
layers.

Attention has QK norms. llama.cpp: `src/models/` lfm2.cpp, lfm2moe.cpp.

    x += o (c * conv(b * h))       b, c, h = in_proj x'     x' = RMSNorm(x)
    x += network(x')                                        x' = RMSNorm(x)

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon; shortconv.l_cache
(taps of the convolution); attention.head_count_kv (0: the layer is a convolution); dense models:
attention.sliding_window (LFM3: of layers by attention.sliding_window_pattern, which rotate by
rope.freq_base_swa); models with experts: expert_feed_forward_length, expert_gating_func,
leading_dense_block_count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.layers import Network
from urdir.model.families.mixtures import (
    expert_width,
    mixture,
    plain_dense,
    router,
    scoring,
    unless_dense,
)
from urdir.model.families.parts import (
    attention,
    head_dims,
    heads,
    output_gate,
    required_head_norms,
    rms_norm,
)
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import ShortConv, convolution
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import optional_window, optional_windows


def lfm2(file: Reader) -> Description:
    """LFM2, dense (arXiv 2511.23404)."""
    window = optional_window(file)
    return _decoder(file, lambda index: plain_dense(file, index), lambda _: {"window": window})


def lfm2moe(file: Reader) -> Description:
    """LFM2 with experts: a selection bias; weights sum to 1."""
    scores = scoring(file)

    def experts(index: int) -> Mixture:
        route = router(file, index, scores, normalize=True, choice_bias="required")
        return mixture(file, index, route, expert_width(file, index))

    return _decoder(file, unless_dense(file, experts))


def lfm3(file: Reader) -> Description:
    """LFM3, dense: attention with gates of heads, windows in some layers, which rotate by a base of
    their own; norms also after networks. Both are left out where own.gates or own.post_norms is
    false. Folders only."""
    key_dim, full = head_dims(file)[0], shared_rope(file, "half")
    local = windowed_rope(file, full, key_dim, scaled=False)
    windowed = optional_windows(file, window := optional_window(file), 0)
    is_gated = file.own("gates", bool, True)

    def more(index: int) -> dict[str, Any]:
        own = {"rope": local, "window": window} if windowed[index] else {"rope": full}
        if not is_gated:
            return own
        return {**own, "gate": output_gate(file, index, heads(file, index)[0], "sigmoid")}

    norms = ("post_attention_norm", "post_ffw_norm") if file.own("post_norms", bool, True) else None
    return _decoder(
        file, lambda index: plain_dense(file, index), more, post_norms=norms or (None, None)
    )


def _decoder(
    file: Reader,
    network: Callable[[int], Network],
    more: Callable[[int], dict[str, Any]] | None = None,
    **options: Any,
) -> Description:
    """The decoder; ``more`` gives further fields of a layer's attention."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    rope = shared_rope(file, "half")
    kv_heads = file.by_layer("attention.head_count_kv", int)

    def attends(index: int) -> Attention:
        norms = required_head_norms(file, index, norm, key_dim)
        own = {"rope": rope, **(more(index) if more else {})}
        return attention(file, index, qk_norm=norms, output_bias="absent", **own)

    return rms_decoder(
        file,
        lambda index: attends(index) if kv_heads[index] else _short_conv(file, index),
        network,
        output_norm="token_embd_norm",
        **options,
    )


def _short_conv(file: Reader, layer: int) -> ShortConv:
    hidden = file.hidden
    parts = file.linear("shortconv.in_proj", layer, 3 * hidden, hidden)
    return ShortConv(
        values=parts.part(2 * hidden, hidden),
        input_gate=parts.part(0, hidden),
        output_gate=parts.part(hidden, hidden),
        conv=convolution(file, "shortconv.l_cache", "shortconv.conv", layer, hidden),
        o=file.linear("shortconv.out_proj", layer, hidden, hidden),
    )


ARCHITECTURES = {"lfm2": lfm2, "lfm2moe": lfm2moe, "lfm3": lfm3}
