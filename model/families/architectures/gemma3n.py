"""Gemma 3n (Google 2025): several streams, per-layer embeddings, sparse gates, shared caches.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon, attention.sliding_window,
attention.sliding_window_pattern (default 5), rope.freq_base_swa (default 10000). Numbers of
streams, of layers with a cache and of sparse layers are fixed, as in llama.cpp: `src/models/`
gemma3n.cpp, `src/llama-hparams.h`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.architectures.gemma4 import (
    layer_embedding,
    layer_embeddings,
    unused_keys_of,
)
from urdir.model.families.attention import Attention
from urdir.model.families.dense import mixer, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import AltUp, Block, Branch, LayerConfig
from urdir.model.families.parts import GELU, dense, head_dims, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import windowed_layers
from urdir.ptxgen.kernels.norm import Norm

#: Streams, values of a layer's embedding, and the rank of LAuReL.
STREAMS, WIDTH, RANK = 4, 256, 64
#: Layers with keys and values of their own, and layers with sparse gates: the first ones.
CACHED, SPARSE = 20, 10
#: Of a normal distribution 5 % are this many standard deviations above the mean.
DEVIATIONS = 1.6448533535003662


def gemma3n(file: Reader) -> Description:
    """Gemma 3n, its text."""
    norm, key_dim = rms_norm(file), head_dims(file)[0]
    if file.of_folder:
        file.has_key("own.tokens")  # of their embeddings in layers, which have as many rows
    window, windowed = file.size("attention.sliding_window"), windowed_layers(file, 5)
    if len(windowed) > CACHED and windowed[CACHED - 2 : CACHED] != [True, False]:
        raise ConfigError(
            f"layers {CACHED - 2} and {CACHED - 1} must have a window and none: later layers read "
            f"their caches ({file.key('attention.sliding_window_pattern')})"
        )
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, key_dim, scaled=False, base=1e4)
    sources = [
        None if index < CACHED else CACHED - (2 if is_local else 1)
        for index, is_local in enumerate(windowed)
    ]

    def attends(index: int) -> Attention:
        is_local, source = windowed[index], sources[index]
        build = mixer(file, local if is_local else rope, head_norm=True, scale=1.0)
        values = Norm("rms", norm.eps, weight=False)
        of = replace(build(index), window=window if is_local else 0, v_norm=values)
        if source is None:
            return of
        assert of.qk_norm is not None
        norms = replace(of.qk_norm, k=of.qk_norm.q)
        return replace(of, k=None, v=None, qk_norm=norms, shares_cache_of=source)

    def layer(index: int) -> LayerConfig:
        network = dense(file, index, GELU, bias="absent")
        if index < SPARSE:
            # kernels take the deviation of a sample, as llama.cpp; transformers that of the values
            share = (network.width - 1) / network.width if file.of_folder else 1.0
            network = replace(network, deviations=DEVIATIONS * math.sqrt(share))

        def block(of: Attention | Dense, before: str, after: str) -> Block:
            norms = file.norm(before, index, norm), file.norm(after, index, norm)
            return Block((Branch(of, *norms),))

        first = block(attends(index), "attn_norm", "post_attention_norm")
        second = block(network, "ffn_norm", "post_ffw_norm")
        embedding = layer_embedding(file, index, norm, WIDTH)
        return LayerConfig((first, second), embedding, altup=_altup(file, index, norm))

    hidden = file.hidden
    first, last = (
        file.linear(name, None, STREAMS - 1, hidden, hidden)
        for name in ("altup_proj", "altup_unembd_proj")
    )
    parts = range(0, (STREAMS - 1) * hidden, hidden)
    description = model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        output_bias="absent",
        embedding_scale=math.sqrt(hidden),
        layer_embeddings=layer_embeddings(file, norm, WIDTH),
        softcap=30.0,
        streams=tuple(first.part(at, hidden) for at in parts),
        merges=tuple(last.part(at, hidden) for at in parts),
    )
    unused = (*description.unused_tensors, *unused_keys_of(file, sources))
    return replace(description, unused_tensors=unused)


def _altup(file: Reader, layer: int, norm: Norm) -> AltUp:
    hidden, low = file.hidden, RANK
    return AltUp(
        file.linear("altup_router", layer, STREAMS, hidden),
        file.norm("altup_router_norm", layer, norm),
        file.linear("altup_predict_coef", layer, STREAMS**2, STREAMS),
        file.linear("altup_correct_coef", layer, STREAMS, STREAMS),
        file.vector("altup_correct_scale.weight", layer, hidden),
        (
            file.linear("laurel_l", layer, low, hidden),
            file.linear("laurel_r", layer, hidden, low),
        ),
        file.norm("laurel_post_norm", layer, norm),
    )


ARCHITECTURES = {"gemma3n": gemma3n}
