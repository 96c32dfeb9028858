"""RWKV 6 and 7, and models whose attention became such time mixing (QRWKV, ARWKV).

    x += O wkv(mixes of norm(x))        x += channel mixing or a dense FFN of norm(x)

llama.cpp: `src/models/` rwkv6-base.cpp, rwkv7-base.cpp, rwkv6.cpp, rwkv6qwen2.cpp, rwkv7.cpp,
arwkv7.cpp.

Keys: those of `parts`, attention.layer_norm_epsilon, attention.layer_norm_rms_epsilon (models with
attention before); wkv.head_size, token_shift_count. RWKV 7: attention.decay_lora_rank,
iclr_lora_rank, value_residual_mix_lora_rank, gate_lora_rank. RWKV 6: time_mix_extra_dim,
time_decay_extra_dim, rescale_every_n_layers (0 alone).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Description
from urdir.model.families.layers import LayerConfig, Network
from urdir.model.families.parts import dense, layer_norm, model, rms_norm, sequential
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.rwkv import ChannelMix, Dynamic, LowRank, TimeMix
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.wkv import Wkv

#: The norm of a head's values; no key has its epsilon.
_HEADS = Norm("layer", 64e-5)
_TANH, _SIGMOID = Activation("tanh"), Activation("sigmoid")


def rwkv7(file: Reader) -> Description:
    """RWKV 7 (arXiv 2503.14456)."""
    return _rwkv(file, _seventh, lambda layer: _channel_mix(file, layer, "k"))


def arwkv7(file: Reader) -> Description:
    """ARWKV (arXiv 2501.15570): RWKV 7's time mixing in a transformer."""
    return _transformer(file, _seventh)


def rwkv6(file: Reader) -> Description:
    """RWKV 6 (arXiv 2404.05892)."""
    return _rwkv(file, _sixth, lambda layer: _channel_mix(file, layer, "kr"))


def rwkv6qwen2(file: Reader) -> Description:
    """QRWKV 6: gated linear attention with RWKV 6's mixes in a transformer."""
    return _transformer(file, _sixth)


# ---- models ----


def _rwkv(
    file: Reader, mixer: Callable[[Reader, int], TimeMix], network: Callable[[int], ChannelMix]
) -> Description:
    norm = layer_norm(file)
    _check_shifts(file, 2)

    def normed(name: str, layer: int | None = None) -> Normalization:
        return file.norm(name, layer, norm, bias="required")

    def layer(index: int) -> LayerConfig:
        norms = normed("attn_norm", index), normed("attn_norm_2", index)
        return sequential(mixer(file, index), network(index), norms)

    embedding_norm = normed("token_embd_norm")
    return _model(file, layer, normed("output_norm"), embedding_norm=embedding_norm)


def _transformer(file: Reader, mixer: Callable[[Reader, int], TimeMix]) -> Description:
    norm = rms_norm(file)
    _check_shifts(file, 1)

    def layer(index: int) -> LayerConfig:
        network: Network = dense(file, index, bias="absent")
        norms = file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)
        return sequential(mixer(file, index), network, norms)

    after = file.norm("output_norm", None, norm, bias="optional")
    return _model(file, layer, after)


def _model(
    file: Reader, layer: Callable[[int], LayerConfig], norm: Normalization, **options: Any
) -> Description:
    """Unused are mixes that the file also has together, and residuals of the first layer."""
    fused = file.anywhere("time_mix_lerp_fused.weight")
    mixes = [f"time_mix_lerp_{of}.weight" for of in "wkvrg"] if fused else []
    options |= {"output": "required", "output_bias": "absent", "unused": mixes}
    of = model(file, layer, norm, **options)
    first = [f"blk.0.time_mix_v{part}.weight" for part in range(3)]
    first = [name for name in first if name in file.stored]
    return replace(of, unused_tensors=(*of.unused_tensors, *first))


def _check_shifts(file: Reader, count: int) -> None:
    shifts = file.count("token_shift_count", 2)
    if shifts != count:
        raise ConfigError(f"{file.key('token_shift_count')} is {shifts}; {count} in this family")
    if file.count("rescale_every_n_layers"):
        raise UnsupportedError(f"{file.key('rescale_every_n_layers')} is not 0")


def _heads(file: Reader) -> int:
    hidden, dim = file.hidden, file.size("wkv.head_size")
    if hidden % dim or not Wkv.serves(dim):
        raise ConfigError(
            f"{file.key('wkv.head_size')} is {dim}: 32, 64 or 128 are supported, of which "
            f"{file.key('embedding_length')}, {hidden}, is a multiple"
        )
    return hidden // dim


# ---- networks ----


def _linear(
    file: Reader, name: str, layer: int, rows: int, cols: int, bias: Presence = "absent"
) -> Linear:
    return file.linear(f"time_mix_{name}", layer, rows, cols, bias=bias)


def _low_rank(
    file: Reader, name: str, layer: int, rank: int, activation: Activation | None = None
) -> LowRank:
    """``name``1 and ``name``2, and the bias ``name``0 if the file has it."""
    hidden = file.hidden
    up = _linear(file, f"{name}2", layer, hidden, rank)
    bias = file.optional_vector(f"time_mix_{name}0.weight", layer, hidden)
    down = _linear(file, f"{name}1", layer, rank, hidden)
    return LowRank(down, replace(up, bias=bias), activation)


def _seventh(file: Reader, layer: int) -> TimeMix:
    """The first layer has matrices of a residual that llama.cpp does not use."""
    hidden, heads = file.hidden, _heads(file)
    rates = file.size("attention.iclr_lora_rank")
    values = file.size("attention.value_residual_mix_lora_rank")
    gates = file.count("attention.gate_lora_rank")
    gated = gates > 0 and file.anywhere("time_mix_g1.weight")
    order = "rwkvag" if gated else "rwkva"
    fused = file.vector("time_mix_lerp_fused.weight", layer, len(order), 1, 1, hidden)
    of = TimeMix(
        "rwkv7",
        heads,
        _parts(fused, hidden),
        order,
        _linear(file, "receptance", layer, hidden, hidden),
        _linear(file, "key", layer, hidden, hidden),
        _linear(file, "value", layer, hidden, hidden),
        _low_rank(file, "w", layer, file.size("attention.decay_lora_rank"), _TANH),
        _low_rank(file, "g", layer, gates, _SIGMOID) if gated else None,
        _norm_of_heads(file, layer),
        _linear(file, "output", layer, hidden, hidden),
        file.vector("time_mix_r_k.weight", layer, hidden),
        rate=_low_rank(file, "a", layer, rates),
        key_scale=file.vector("time_mix_k_k.weight", layer, hidden),
        key_rate=file.vector("time_mix_k_a.weight", layer, hidden),
    )
    if layer == 0:
        return replace(of, names_values=True)
    return replace(of, residual=_low_rank(file, "v", layer, values))


def _sixth(file: Reader, layer: int) -> TimeMix:
    """Without time_mix_first: gated linear attention, whose heads may share keys and values."""
    hidden, heads, dim = file.hidden, _heads(file), file.size("wkv.head_size")
    extra, decay = file.size("time_mix_extra_dim"), file.size("time_decay_extra_dim")
    keys = file.by_layer("attention.head_count_kv", int, 0)[layer] or heads
    if keys < 0 or heads % keys:
        raise ConfigError(f"{heads} heads share {keys} ({file.key('attention.head_count_kv')})")
    is_six = file.anywhere("time_mix_first.weight")
    low = _linear(file, "w1", layer, 5 * extra, hidden)
    high = file.linear("time_mix_w2", layer, 5, hidden, extra)
    lerp = tuple(file.vector(f"time_mix_lerp_{of}.weight", layer, hidden) for of in "wkvrg")
    if file.anywhere("time_mix_lerp_fused.weight"):
        lerp = _parts(file.vector("time_mix_lerp_fused.weight", layer, 5, 1, 1, hidden), hidden)
    down = _linear(file, "decay_w1", layer, decay, hidden)
    up = _linear(file, "decay_w2", layer, hidden, decay)
    up = replace(up, bias=file.vector("time_mix_decay.weight", layer, hidden))
    return TimeMix(
        "rwkv6" if is_six else "gated",
        heads,
        lerp,
        "wkvrg",
        _linear(file, "receptance", layer, hidden, hidden, "optional"),
        _linear(file, "key", layer, keys * dim, hidden, "optional"),
        _linear(file, "value", layer, keys * dim, hidden, "optional"),
        LowRank(down, up, _TANH),
        _linear(file, "gate", layer, hidden, hidden),
        _norm_of_heads(file, layer) if is_six else None,
        _linear(file, "output", layer, hidden, hidden),
        file.vector("time_mix_first.weight", layer, heads, dim) if is_six else None,
        dynamic=Dynamic(
            file.vector("time_mix_lerp_x.weight", layer, hidden),
            tuple(low.part(i * extra, extra) for i in range(5)),
            tuple(high.part(i * hidden, hidden) for i in range(5)),
        ),
    )


def _parts(fused: StoredVector, hidden: int) -> tuple[StoredVector, ...]:
    return tuple(fused.part(first, hidden) for first in range(0, fused.size, hidden))


def _norm_of_heads(file: Reader, layer: int) -> Normalization | None:
    if not file.anywhere("time_mix_ln.weight"):
        return None
    return file.norm("time_mix_ln", layer, _HEADS, file.hidden, bias="required")


def _channel_mix(file: Reader, layer: int, mixes: str) -> ChannelMix:
    """The mixes of key and receptance, in that order."""
    hidden, width = file.hidden, file.size_at("feed_forward_length", layer)

    def linear(name: str, rows: int, cols: int) -> Linear:
        return file.linear(f"channel_mix_{name}", layer, rows, cols)

    return ChannelMix(
        tuple(file.vector(f"channel_mix_lerp_{mix}.weight", layer, hidden) for mix in mixes),
        linear("key", width, hidden),
        linear("value", hidden, width),
        linear("receptance", hidden, hidden) if "r" in mixes else None,
    )


ARCHITECTURES = {
    "rwkv6": rwkv6,
    "rwkv6qwen2": rwkv6qwen2,
    "rwkv7": rwkv7,
    "arwkv7": arwkv7,
}
