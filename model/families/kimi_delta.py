"""Kimi Delta Attention (arXiv 2510.26692) with MLA in the other layers, read from a file.

Keys, under the architecture's name: attention.layer_norm_rms_epsilon; attention.head_count_kv (0:
the layer is a delta rule) and head_count, whose first value above 0 counts for all layers;
kda.head_dim, ssm.conv_kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.layers import Network
from urdir.model.families.mixtures import without
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import model, qkv, rms_norm, sequential
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Convolved, KimiDelta, convolution
from urdir.model.families.stored import Linear

#: A matrix, and optionally the matrix that feeds it (a low-rank factorisation).
Factors = tuple[Linear, Linear | None]


def kimi_decoder(
    file: Reader,
    attends: Callable[[int], Attention],
    delta: Callable[[int], KimiDelta],
    network: Callable[[int], Network],
    nextn: NextnKind | None = None,
) -> Description:
    """Describe a model by its mixers and FFNs of each layer. llama.cpp loads biases of Q, K and V
    of delta rules without using them."""
    norm, kv_heads = rms_norm(file), file.by_layer("attention.head_count_kv", int)
    description = model(
        file,
        lambda index: sequential(
            attends(index) if kv_heads[index] else delta(index),
            network(index),
            (file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)),
        ),
        file.norm("output_norm", None, norm),
        nextn=nextn,
    )
    return without(description, file, KimiDelta, [f"attn_{name}.bias" for name in ("q", "k", "v")])


def heads_of_all(file: Reader) -> int:
    """Number of heads, the same in every layer."""
    counts = file.by_layer("attention.head_count", int)
    heads = next((count for count in counts if count), 0)
    if heads < 1:
        raise ConfigError(f"{file.key('attention.head_count')} is {heads}: no layer has heads")
    return heads


def low_rank(file: Reader, layer: int, name: str, heads: int) -> Factors:
    """The low-rank product ``name``_b of ``name``_a, of rank head dimension."""
    dim = file.size("kda.head_dim")
    return (
        file.linear(f"{name}_b", layer, heads * dim, dim),
        file.linear(f"{name}_a", layer, dim, file.hidden),
    )


def kimi_delta(
    file: Reader,
    layer: int,
    heads: int,
    decay: Factors,
    gate: Factors,
    floor: float = 0.0,
    *,
    negated: bool = False,
) -> KimiDelta:
    """The Kimi Delta mixer of a layer; see `KimiDelta` for ``floor`` and ``negated``."""
    norm, hidden, dim = rms_norm(file), file.hidden, file.size("kda.head_dim")
    if dim % 4:
        raise UnsupportedError(f"{file.key('kda.head_dim')} is {dim}: multiples of 4 are supported")
    width = heads * dim

    def convolved(name: str, linear: Linear) -> Convolved:
        conv = convolution(file, "ssm.conv_kernel", f"ssm_conv1d_{name}", layer, width, 1)
        return Convolved(linear, conv)

    q, k, v = qkv(file, layer, (width, width, width), "absent")
    return KimiDelta(
        q=convolved("q", q),
        k=convolved("k", k),
        v=convolved("v", v),
        decay=decay[0],
        beta=file.linear("ssm_beta", layer, heads, hidden),
        gate=gate[0],
        a=file.vector("ssm_a", layer, heads, *(() if negated else (1,))),
        dt_bias=file.vector("ssm_dt.bias", layer, width),
        norm=file.norm("ssm_norm", layer, norm, dim),
        o=file.linear("attn_output", layer, hidden, width),
        eps=norm.eps,
        floor=floor,
        negated=negated,
        decay_low=decay[1],
        gate_low=gate[1],
    )
