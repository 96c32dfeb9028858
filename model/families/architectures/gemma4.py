"""Gemma 4 (Google 2026): shared KV caches, per-layer embeddings, wider heads in global layers.

It extends Gemma 3: full-attention layers have wider heads, keys may serve as values, late layers
reuse the keys and values of earlier ones, and every layer has a token embedding.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon, attention.sliding_window,
attention.sliding_window_pattern (a flag for each layer), attention.key_length_swa and
value_length_swa, attention.shared_kv_layers, rope.freq_base_swa (default 10000),
rope.dimension_count_swa, embedding_length_per_layer_input (0: none), final_logit_softcapping
(default 30; 0: none), expert_feed_forward_length. llama.cpp: `src/models/` gemma4.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.description import Description, LayerEmbeddings
from urdir.model.families.feed_forward import Router
from urdir.model.families.layers import Block, Branch, LayerConfig, LayerEmbedding
from urdir.model.families.mixtures import expert_width, mixture, router
from urdir.model.families.parts import GELU, dense, head_dims, heads, model, qkv, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, read_rope, windowed_rope
from urdir.model.families.stored import Linear, Normalization
from urdir.model.families.windows import flagged_layers
from urdir.ptxgen.kernels.norm import Norm


def gemma4(file: Reader) -> Description:
    """Gemma 4, dense or with experts in parallel with the dense FFN."""
    norm, windowed = rms_norm(file), flagged_layers(file)
    for kind in ("key", "value"):
        file.required(f"attention.{kind}_length_swa", int)
    own = file.layer_count() - file.count("attention.shared_kv_layers")
    if not own > 0 or own < min(2, len(windowed)):
        raise ConfigError(f"{file.key('attention.shared_kv_layers')} leaves {own} layers")
    sources = [_source(file, windowed, own, layer) for layer in range(len(windowed))]
    width = file.count("embedding_length_per_layer_input")
    ropes = layer_ropes(file, windowed)

    def layer(index: int) -> LayerConfig:
        found = gemma4_layer(file, index, ropes, windowed[index], sources[index])
        embedding = layer_embedding(file, index, norm, width) if width else None
        return replace(found, embedding=embedding)

    description = model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        embedding_scale=math.sqrt(file.hidden),
        layer_embeddings=layer_embeddings(file, norm, width) if width else None,
        softcap=file.amount("final_logit_softcapping", 30.0),
    )
    unused = (*description.unused_tensors, *unused_keys_of(file, sources))
    return replace(description, unused_tensors=unused)


def gemma4_layer(
    file: Reader, index: int, ropes: dict[bool, RopeConfig], windowed: bool, source: int | None
) -> LayerConfig:
    """A layer without the tokens' embeddings of its own. One that reads the keys and values of the
    layer ``source`` has none."""
    norm, window = rms_norm(file), file.size("attention.sliding_window")
    mixer = _attention(file, index, norm, ropes[windowed], windowed, source)
    mixer = replace(mixer, window=window if windowed else 0)
    attends = Block(
        (Branch(mixer, file.norm("attn_norm", index, norm)),),
        file.norm("post_attention_norm", index, norm),
    )
    return LayerConfig(
        (attends, _network(file, index, norm)),
        output_scale=file.optional_vector("layer_output_scale.weight", index, 1),
    )


def _source(file: Reader, windowed: list[bool], own: int, layer: int) -> int | None:
    """The layer whose keys and values a late layer reuses. Of the last two layers with their own
    cache, the first uses a window and the second attends globally."""
    if layer < own:
        return None
    source = own - (2 if windowed[layer] else 1)
    if source < 0 or windowed[source] != windowed[layer]:
        raise ConfigError(
            f"layer {layer} has no earlier layer of its kind whose keys and values it could reuse "
            f"({file.key('attention.shared_kv_layers')}, sliding_window_pattern)"
        )
    return source


def layer_ropes(file: Reader, windowed: list[bool]) -> dict[bool, RopeConfig]:
    """The rotations of windowed and of global layers. Global layers divide the frequencies, so that
    part of each head rotates very slowly."""
    full_dim, local_dim = head_dims(file)[0], head_dims(file, windowed=True)[0]
    rope = read_rope(file, "half", full_dim, factors=False)
    local = windowed_rope(file, rope, local_dim, scaled=False, base=1e4)
    if not all(windowed) and not file.of_folder:
        factors = file.vector("rope_freqs.weight", None, full_dim // 2)
        rope = replace(rope, factors=factors.part(0, rope.dim // 2))
    return {False: rope, True: local}


def _attention(
    file: Reader, layer: int, norm: Norm, rope: RopeConfig, windowed: bool, source: int | None
) -> Attention:
    queries, keys = heads(file, layer)
    key_dim, value_dim = head_dims(file, windowed)
    if key_dim != value_dim:
        raise ConfigError(
            f"{file.key('attention.key_length')} is {key_dim}, value_length is {value_dim} in "
            f"layer {layer}; expected the same"
        )
    width = keys * key_dim
    k: Linear | None
    v: Linear | None
    if file.has("attn_qkv.weight", layer):
        q, k, v = qkv(file, layer, (queries * key_dim, width, width), "absent")
    else:
        q = file.linear("attn_q", layer, queries * key_dim, file.hidden)
        k, v = (file.linear(f"attn_{name}", layer, width, file.hidden) for name in "kv")
        if not file.has("attn_v.weight", layer):
            v = None
    q_norm = file.norm("attn_q_norm", layer, norm, key_dim)
    # a layer that reuses a cache has no keys to normalise
    k_norm = q_norm if source is not None else file.norm("attn_k_norm", layer, norm, key_dim)
    return Attention(
        heads=queries,
        kv_heads=keys,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=1.0,
        q=q,
        k=k if source is None else None,
        v=v if source is None else None,
        o=file.linear("attn_output", layer, file.hidden, queries * value_dim),
        rope=rope,
        qk_norm=QkNorm(q_norm, k_norm),
        v_norm=Norm("rms", norm.eps, weight=False),
        shares_cache_of=source,
    )


def _network(file: Reader, layer: int, norm: Norm) -> Block:
    """A dense FFN; in layers with a router, experts in parallel, each branch with its own norms."""
    network = dense(file, layer, GELU, bias="absent")
    before, after = (file.norm(name, layer, norm) for name in ("ffn_norm", "post_ffw_norm"))
    if not file.has("ffn_gate_inp.weight", layer):
        return Block((Branch(network, before),), after)
    branches = (
        Branch(network, before, file.norm("post_ffw_norm_1", layer, norm)),
        Branch(
            mixture(file, layer, _router(file, layer, norm), expert_width(file, layer), GELU),
            file.norm("pre_ffw_norm_2", layer, norm),
            file.norm("post_ffw_norm_2", layer, norm),
        ),
    )
    return Block(branches, after)


def _router(file: Reader, layer: int, norm: Norm) -> Router:
    """The router: it reads its own norm of the residual stream; each expert has an output scale."""
    weight = file.vector("ffn_gate_inp.scale", layer, file.hidden)
    route = router(file, layer, normalize=True)
    scale = None
    if file.has("ffn_down_exps.scale", layer):
        scale = file.vector("ffn_down_exps.scale", layer, route.experts)
    return replace(
        route,
        reads="norm",
        norm=Normalization(norm, weight),
        norm_scale=1.0 / math.sqrt(file.hidden),
        expert_scale=scale,
    )


def layer_embedding(file: Reader, layer: int, norm: Norm, width: int) -> LayerEmbedding:
    """What a layer makes of its token embedding."""
    return LayerEmbedding(
        file.linear("inp_gate", layer, width, file.hidden),
        file.linear("proj", layer, file.hidden, width),
        file.norm("post_norm", layer, norm),
        GELU,
    )


def layer_embeddings(file: Reader, norm: Norm, width: int) -> LayerEmbeddings:
    """Token embeddings of all layers."""
    hidden, total = file.hidden, file.layer_count() * width
    vocab = file.stored.get("token_embd.weight", (0,))[0]
    return LayerEmbeddings(
        table=file.matrix("per_layer_token_embd", None, vocab, total),
        scale=math.sqrt(width),
        proj=file.linear("per_layer_model_proj", None, total, hidden),
        proj_scale=1.0 / math.sqrt(hidden),
        norm=file.norm("per_layer_proj_norm", None, norm, width),
        input_scale=1.0 / math.sqrt(2.0),
        width=width,
    )


def unused_keys_of(file: Reader, sources: list[int | None]) -> Iterator[str]:
    """Stored K and V matrices of layers that reuse another layer's cache."""
    for layer, source in enumerate(sources):
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            if source is not None and file.has(f"{name}.weight", layer):
                yield f"blk.{layer}.{name}.weight"


ARCHITECTURES = {"gemma4": gemma4}
