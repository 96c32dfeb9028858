"""The decoder of llama, qwen2 and qwen3: all layers alike, softmax attention and SwiGLU.

    x += O attention(rope(norm(Q x')), rope(norm(K x')), V x')        x' = RMSNorm(x)
    x += down(silu(gate x') * up x')                                  x' = RMSNorm(x)

It is that of LLaMA (Touvron et al. 2023, arXiv 2302.13971) with grouped queries (GQA, Ainslie et
al. 2023, arXiv 2305.13245). Metadata keys, under the architecture's name:

    block_count  context_length  embedding_length  feed_forward_length
    attention.head_count             attention.head_count_kv    default: head_count
    attention.key_length, value_length                          default: hidden / heads; must agree
    attention.layer_norm_rms_epsilon
    rope.*                                                      see `rope.read_rope`
    expert_count                                                refused unless 0

The tensors of a file show which optional parts it has: an output matrix (else the embedding is used
again), its bias, RoPE factors, biases of Q, K and V, norms of queries and keys. The first layer
stands for all.
"""

from __future__ import annotations

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.description import Attention, Config, Dense, LayerConfig
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.tensors import tensor_name
from urdir.ptxgen.kernels.rotation import RopeStyle


def read_decoder(file: Reader, rope_style: RopeStyle, *, may_have_qk_norm: bool = False) -> Config:
    """Describe such a model. Raises UnsupportedError or ConfigError, naming the key."""
    if experts := file.optional("expert_count", int, 0):
        raise UnsupportedError(f"a mixture of {experts} experts ({file.key('expert_count')})")
    hidden, context_length = file.size("embedding_length"), file.size("context_length")
    mixer = _read_attention(file, hidden, context_length, rope_style, may_have_qk_norm)
    layer = LayerConfig(mixer, Dense(file.size("feed_forward_length")))
    return Config(
        architecture=file.architecture,
        layers=(layer,) * file.layer_count(),
        hidden=hidden,
        vocab_size=_vocab_size(file),
        context_length=context_length,
        rms_eps=file.number("attention.layer_norm_rms_epsilon"),
        tied=tensor_name("output") not in file.stored,
        output_bias=tensor_name("output_bias") in file.stored,
    )


def _read_attention(
    file: Reader, hidden: int, context_length: int, rope_style: RopeStyle, may_have_qk_norm: bool
) -> Attention:
    heads = file.size("attention.head_count")
    kv_heads = file.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads are no multiple of {kv_heads} KV heads "
            f"({file.key('attention.head_count')}, head_count_kv)"
        )
    key_dim = file.size("attention.key_length", hidden // heads)
    value_dim = file.size("attention.value_length", hidden // heads)
    if value_dim != key_dim:
        raise UnsupportedError(
            f"heads of {key_dim} for keys and {value_dim} for values "
            f"({file.key('attention.key_length')}, value_length); they must agree"
        )
    has_factors = tensor_name("rope_factors") in file.stored
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rope=read_rope(file, rope_style, key_dim, context_length, has_factors=has_factors),
        qkv_bias=tensor_name("q_bias", 0) in file.stored,
        qk_norm=may_have_qk_norm and tensor_name("q_norm", 0) in file.stored,
    )


def _vocab_size(file: Reader) -> int:
    """The embedding's rows: the metadata may lack the number, and a vocabulary may be shorter."""
    name = tensor_name("embedding")
    if name not in file.stored:
        raise ConfigError(f"tensor '{name}' is missing")
    return file.stored[name][0]
