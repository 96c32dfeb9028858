"""Parts of layers read from a file: heads, projections, norms, attention, FFNs.

Keys of all of them, under the architecture's name:

    block_count  context_length  embedding_length  feed_forward_length (for all layers or each)
    attention.head_count, head_count_kv (for all layers or each; default: head_count)
    attention.key_length, value_length                          default: hidden / heads
        attention.causal            false is refused, except of encoders
        nextn_predict_layers            number of trailing layers for multi-token prediction (MTP):
                                        see `nextn`; unused unless they are read
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention, OutputGate, QkNorm
from urdir.model.families.description import Description
from urdir.model.families.embedding import read_embedding
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.nextn import NextnHead, NextnKind, nextn_head
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm

SILU = Activation("silu")
GELU = Activation("gelu")
GELU_ERF = Activation("gelu_erf")
RELU = Activation("relu")
RELU2 = Activation("relu2")


def rms_norm(file: Reader) -> Norm:
    """RMSNorm with the file's attention.layer_norm_rms_epsilon."""
    return Norm("rms", file.rms())


def layer_norm(file: Reader) -> Norm:
    """LayerNorm with the file's attention.layer_norm_epsilon."""
    return Norm("layer", file.number("attention.layer_norm_epsilon"))


def heads(file: Reader, layer: int) -> tuple[int, int]:
    """Numbers of query heads and KV heads in a layer."""
    queries = file.size_at("attention.head_count", layer)
    keys = file.size_at("attention.head_count_kv", layer, queries)
    if queries % keys:
        raise ConfigError(
            f"{queries} query heads are not a multiple of {keys} KV heads "
            f"({file.key('attention.head_count')}, head_count_kv)"
        )
    return queries, keys


def head_dims(file: Reader, windowed: bool = False) -> tuple[int, int]:
    """Dimensions of a key head and a value head; ``windowed`` layers may have their own
    (attention.key_length_swa, value_length_swa)."""
    layers = file.by_layer("attention.head_count", int)  # 0 where a layer has no attention
    default = file.hidden // max(1, next((count for count in layers if count > 0), 1))
    dims = [file.size(f"attention.{kind}_length", default) for kind in ("key", "value")]
    if windowed:
        keys, values = ("attention.key_length_swa", "attention.value_length_swa")
        return file.size(keys, dims[0]), file.size(values, dims[1])
    return dims[0], dims[1]


def qkv(
    file: Reader,
    layer: int,
    widths: tuple[int, int, int],
    bias: Presence = "optional",
) -> tuple[Linear, Linear, Linear]:
    """The matrices Q, K and V with those rows: separate, or parts of one (attn_qkv)."""
    total = sum(widths)
    if file.own("fused_by_head", bool, False):
        return _qkv_by_head(file, layer, widths, bias)
    if not file.has("attn_qkv.weight", layer):
        q, k, v = (
            file.linear(f"attn_{name}", layer, width, file.hidden, bias=bias)
            for name, width in zip("qkv", widths, strict=True)
        )
        return q, k, v
    fused = file.linear("attn_qkv", layer, total, file.hidden, bias=bias)
    parts = []
    for number, (name, width) in enumerate(zip("qkv", widths, strict=True)):
        first = sum(widths[:number])
        part = fused.part(first, width)
        if part.bias is None and bias != "absent":
            part = replace(part, bias=file.optional_vector(f"attn_{name}.bias", layer, width))
        parts.append(part)
    return parts[0], parts[1], parts[2]


def _qkv_by_head(
    file: Reader, layer: int, widths: tuple[int, int, int], bias: Presence
) -> tuple[Linear, Linear, Linear]:
    """Q, K and V of a matrix that stores, for each KV head, its queries, its key and its value."""
    count = heads(file, layer)[1]
    each = [width // count for width in widths]
    fused = file.linear("attn_qkv", layer, sum(widths), file.hidden, bias=bias)
    q, k, v = (fused.part(sum(each[:at]), each[at], sum(each)) for at in range(3))
    return q, k, v


def gelu(file: Reader) -> Activation:
    """GELU in llama.cpp's approximation by tanh, or the one that a folder names."""
    return GELU_ERF if file.own("exact_gelu", bool, False) else GELU


def head_norms(file: Reader, layer: int, norm: Norm, dim: int, **options: Any) -> QkNorm | None:
    """Norms attn_q_norm and attn_k_norm (dim,) per head, or None if the file has none."""
    q = file.optional_norm("attn_q_norm", layer, norm, dim)
    k = file.optional_norm("attn_k_norm", layer, norm, dim)
    return QkNorm(q, k, **options) if q and k else None


def required_head_norms(file: Reader, layer: int, norm: Norm, dim: int, **options: Any) -> QkNorm:
    """As `head_norms`, in families whose files must have them."""
    q = file.norm("attn_q_norm", layer, norm, dim)
    return QkNorm(q, file.norm("attn_k_norm", layer, norm, dim), **options)


def row_norms(file: Reader, layer: int, norm: Norm, bias: Presence = "absent") -> QkNorm:
    """As `head_norms`, over all heads together: (heads * head_dim,)."""
    (queries, keys), dim = heads(file, layer), head_dims(file)[0]
    return QkNorm(
        file.norm("attn_q_norm", layer, norm, queries * dim, bias=bias),
        file.norm("attn_k_norm", layer, norm, keys * dim, bias=bias),
        over="row",
    )


def attention(
    file: Reader,
    layer: int,
    rope: RopeConfig | None,
    *,
    scale: float | None = None,
    windowed_dims: bool = False,
    qkv_bias: Presence = "optional",
    output_bias: Presence = "optional",
    **options: Any,
) -> Attention:
    """The attention of a layer, with matrices attn_q, attn_k, attn_v (or attn_qkv) and attn_output.

    ``scale`` defaults to 1 / sqrt(key_dim); ``options`` are fields of `Attention`.
    """
    queries, keys = heads(file, layer)
    key_dim, value_dim = head_dims(file, windowed_dims)
    widths = queries * key_dim, keys * key_dim, keys * value_dim
    q, k, v = qkv(file, layer, widths, qkv_bias)
    output = queries * value_dim
    fields = {
        "heads": queries,
        "kv_heads": keys,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "scale": 1.0 / math.sqrt(key_dim) if scale is None else scale,
        "q": q,
        "k": k,
        "v": v,
        "o": file.linear("attn_output", layer, file.hidden, output, bias=output_bias),
        "rope": rope,
    }
    return Attention(**{**fields, **options, **_said_by_folder(file, layer)})


def _said_by_folder(file: Reader, layer: int) -> dict[str, Any]:
    """Fields of a layer's attention that a folder gives and a GGUF file's family implies."""
    found: dict[str, Any] = {}
    if (window := file.own_at("windows", layer, int, None)) is not None:
        found["window"] = window
    if (scale := file.own("score_scale", float, 0.0)) > 0.0:
        found["scale"] = scale
    if not file.own_at("rotates", layer, bool, True):
        found["rope"] = None
    return found


def output_gate(
    file: Reader,
    layer: int,
    rows: int,
    activation: Literal["sigmoid", "softplus"],
    name: str = "attn_gate",
) -> OutputGate:
    """The gate ``name`` (rows, hidden) on attention's result."""
    return OutputGate(file.linear(name, layer, rows, file.hidden), activation)


def dense(
    file: Reader,
    layer: int,
    activation: Activation = SILU,
    *,
    gated: bool = True,
    width: int | None = None,
    suffix: str = "",
    bias: Presence = "optional",
) -> Dense:
    """The FFN ffn_gate, ffn_up, ffn_down with ``suffix`` ("_shexp": the shared expert). Without a
    gate tensor, the first half of the rows of ffn_up are the gates."""
    hidden = file.hidden
    width = width or file.size_at("feed_forward_length", layer)
    up, down = f"ffn_up{suffix}", f"ffn_down{suffix}"
    last = file.linear(down, layer, hidden, width, bias=bias)
    if not gated:
        return Dense(file.linear(up, layer, width, hidden, bias=bias), last, None, activation)
    if file.anywhere(f"ffn_gate{suffix}.weight"):
        gate = file.linear(f"ffn_gate{suffix}", layer, width, hidden, bias=bias)
        return Dense(file.linear(up, layer, width, hidden, bias=bias), last, gate, activation)
    both = file.linear(up, layer, 2 * width, hidden, bias=bias)
    return Dense(both.part(width, width), last, both.part(0, width), activation)


def sequential(
    mixer: Network,
    ffn: Network,
    norms: tuple[Normalization | None, Normalization | None],
    post_norms: tuple[Normalization | None, Normalization | None] = (None, None),
    *,
    scale: float = 1.0,
    **options: Any,
) -> LayerConfig:
    """Attention, then an FFN; ``options`` are fields of `LayerConfig`."""
    blocks = tuple(
        Block((Branch(network, norm),), post, scale)
        for network, norm, post in zip((mixer, ffn), norms, post_norms, strict=True)
    )
    return LayerConfig(blocks, **options)


def parallel(
    mixer: Network,
    ffn: Network,
    norms: tuple[Normalization | None, Normalization | None],
    *,
    scale: float = 1.0,
) -> LayerConfig:
    """Attention and an FFN in parallel, both on the layer's input."""
    branches = (Branch(mixer, norms[0]), Branch(ffn, norms[1]))
    return LayerConfig((Block(branches, None, scale),))


def model(
    file: Reader,
    layer: Callable[[int], LayerConfig] | Iterable[LayerConfig],
    output_norm: Normalization | None,
    *,
    output: Presence = "optional",
    output_bias: Presence = "optional",
    embedding: str = "token_embd",
    unused: Collection[str] = (),
    nextn: NextnKind | None = None,
    causal: bool = True,
    **options: Any,
) -> Description:
    """The model of these layers, with the matrices ``embedding`` and output. The embedding doubles
    as output if that is "absent", or "optional" and not stored.

    ``unused`` are tensor names, without layer number, that llama.cpp loads without using them.
    ``nextn`` describes the family's MTP heads; None: they are not supported. Encoders are not
    ``causal``. ``options`` are fields of `Description`.
    """
    if not file.optional("attention.causal", bool, True) and causal:
        raise UnsupportedError(
            f"{file.key('attention.causal')} is false: only causal decoders are supported"
        )
    hidden, vocab = file.hidden, _vocab_size(file, f"{embedding}.weight")
    table = file.matrix(embedding, None, vocab, hidden)
    is_own = output == "required" or (output == "optional" and file.has("output.weight"))
    has_bias = output_bias == "required" or (output_bias == "optional" and file.has("output.bias"))
    layers = map(layer, range(file.layer_count())) if callable(layer) else layer
    logits = Linear(
        file.matrix("output", None, vocab, hidden) if is_own else table,
        file.vector("output.bias", None, vocab) if has_bias else None,
    )
    heads: tuple[NextnHead, ...] = ()
    if file.nextn_layers:
        if nextn is None or not callable(layer):
            raise UnsupportedError(
                f"the layers for predicting several tokens of {file.architecture} "
                f"({file.key('nextn_predict_layers')}) are not supported"
            )
        ends = (table, logits, output_norm)
        heads = tuple(nextn_head(file, i, layer(i), nextn, *ends) for i in file.nextn_layers)
    fields = {
        "architecture": file.architecture,
        "layers": tuple(layers),
        "hidden": hidden,
        "vocab_size": vocab,
        "context_length": file.size("context_length"),
        "embedding": table,
        "output": logits,
        "output_norm": output_norm,
        "nextn": heads,
        "embedding_of_texts": read_embedding(file, causal=causal),
        "unused_tensors": (*_of_further_layers(file), *file.of_kinds(unused)),
    }
    # ignored keys are known only after everything was read
    return Description(**{**fields, **options, "ignored_keys": file.ignored_keys})


def _vocab_size(file: Reader, name: str) -> int:
    """Rows of the embedding: the metadata may lack the number, and a vocabulary may be shorter."""
    if not file.has(name):
        raise ConfigError(f"tensor '{name}' is missing")
    shape = file.stored[name]
    if len(shape) != 2 or not all(0 < size < 2**31 for size in shape):
        raise ConfigError(f"tensor '{name}' has shape {shape}, expected one row per token")
    return shape[0]


def _of_further_layers(file: Reader) -> Iterable[str]:
    """Tensors of the MTP layers, unless these are described."""
    if file.nextn_layers or not file.count("nextn_predict_layers"):
        return
    layers = range(file.layer_count(), file.size("block_count"))
    for name in file.stored:
        head, _, rest = name.partition(".")
        if head == "blk" and int(rest.partition(".")[0]) in layers:
            yield name
