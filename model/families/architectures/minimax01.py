"""MiniMax-01 (arXiv 2501.08313): lightning attention in seven of eight layers, experts in all.

Lightning attention decays its states at rates fixed by layer and head; the other layers are
softmax attention. llama.cpp: `src/models/` minimax-01.cpp.

    x = attention(x') + s x',   x = experts(x') + s x'        x' = RMSNorm(x)

The residual is the norm of the stream times a scale s. The stream here is x / s, which becomes
x' + network(x') / s: only norms read it, with the file's epsilon divided by s^2.

Keys: those of `parts`, `rope` and `mixtures`, attention.layer_norm_rms_epsilon, residual_scale (s);
attention.recurrent_layers (a flag for each layer) or full_attention_interval (default 8);
expert_weights_scale.
"""

from __future__ import annotations

from urdir.model.errors import ConfigError
from urdir.model.families.dense import shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.mixtures import dense_width, mixture, router, weights_scale
from urdir.model.families.parts import attention, head_dims, model
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Lightning
from urdir.model.families.stored import Slopes
from urdir.ptxgen.kernels.norm import Norm

#: Accepted range of s; the published model has 3.56.
_SCALES = (2.0**-16, 2.0**16)


def minimax_01(file: Reader) -> Description:
    """MiniMax-Text-01."""
    scale, recurrent = _residual_scale(file), _recurrent_layers(file)
    of_embedding = Norm("rms", file.rms())
    norm = Norm("rms", file.rms() / scale**2)
    rope = shared_rope(file, "half")

    def mixer(layer: int) -> Network:
        if recurrent[layer]:
            return _lightning(file, layer)
        return attention(file, layer, rope, output_bias="absent")

    def block(network: Network, name: str, layer: int, before: Norm) -> Block:
        stream_norm = file.norm(name, layer, before)
        return Block((Branch(network),), scale=1.0 / scale, stream_norm=stream_norm)

    def layer(index: int) -> LayerConfig:
        before = norm if index else of_embedding
        first = block(mixer(index), "attn_norm", index, before)
        return LayerConfig((first, block(_experts(file, index), "ffn_norm", index, norm)))

    return model(file, layer, file.norm("output_norm", None, norm))


def _residual_scale(file: Reader) -> float:
    scale, (least, most) = file.number("residual_scale"), _SCALES
    if not least <= scale <= most:
        raise ConfigError(f"{file.key('residual_scale')} is {scale}, expected {least} to {most}")
    return scale


def _recurrent_layers(file: Reader) -> list[bool]:
    if file.has_key("attention.recurrent_layers"):
        return file.by_layer("attention.recurrent_layers", bool)
    interval = file.size("full_attention_interval", 8)
    return [(layer + 1) % interval != 0 for layer in range(file.layer_count())]


def _lightning(file: Reader, layer: int) -> Lightning:
    """Lightning attention: attn_qkv holds query, key and value of each head in turn."""
    heads, (dim, value_dim) = file.size_at("attention.head_count", layer), head_dims(file)
    if value_dim != dim:
        raise ConfigError(
            f"key heads have {dim} values ({file.key('attention.key_length')}), "
            f"value heads {value_dim} (attention.value_length); expected the same number"
        )
    width = heads * dim
    qkv = file.linear("attn_qkv", layer, 3 * width, file.hidden)
    q, k, v = (qkv.part(first, dim, 3 * dim) for first in (0, dim, 2 * dim))
    return Lightning(
        q=q,
        k=k,
        v=v,
        gate=file.linear("attn_gate", layer, width, file.hidden),
        norm=file.norm("attn_norm_2", layer, Norm("rms", file.rms()), width),
        o=file.linear("attn_output", layer, file.hidden, width),
        slopes=Slopes(layer, file.layer_count(), heads),
    )


def _experts(file: Reader, layer: int) -> Mixture:
    route = router(file, layer, normalize=True, scale=weights_scale(file))
    return mixture(file, layer, route, dense_width(file, layer), gate="optional")


ARCHITECTURES = {"minimax-01": minimax_01}
