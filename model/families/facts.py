"""A model's description as plain values, equal layers grouped.

Absent features and default values are omitted.
"""

from __future__ import annotations

import math
from typing import Any

from urdir.model.families.attention import Attention
from urdir.model.families.compression import Compression
from urdir.model.families.description import Description
from urdir.model.families.embedding import Embedding
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig, Network, StreamJoin
from urdir.model.families.recurrent import (
    Convolution,
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization, of_any_layer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm

Facts = dict[str, Any]


def layer_groups(description: Description) -> list[Facts]:
    """Groups of equal layers: their numbers and contents. A block is a list of networks that read
    the same stream."""
    groups: dict[LayerConfig, list[int]] = {}
    for number, layer in enumerate(description.layers):
        groups.setdefault(of_any_layer(layer), []).append(number)
    return [
        {"layers": numbers, "blocks": [_block(block) for block in layer.blocks], **_end(layer)}
        for layer, numbers in groups.items()
    ]


def model_facts(description: Description) -> Facts:
    """Facts about the model outside its layers."""
    extra = description.layer_embeddings
    return _known(
        architecture=description.architecture,
        layers=description.n_layers,
        hidden=description.hidden,
        vocabulary=description.vocab_size,
        context=description.context_length,
        embedding_scale=_other_than(description.embedding_scale, 1.0),
        embedding_norm=_norm(description.embedding_norm),
        positions=description.positions and description.positions.rows,
        layer_embeddings=extra and extra.width,
        output_norm=_norm(description.output_norm),
        output="the embedding again" if description.tied else None,
        output_bias=description.output.bias is not None,
        logit_scale=_other_than(description.logit_scale, 1.0),
        softcap=description.softcap,
        switched_adapters=description.switch and len(description.switch.tokens),
        hidden_logits=description.hides and list(description.hides),
        streams=len(description.streams),
        weighted_sum_of_streams=isinstance(description.join, StreamJoin),
        saves=description.saves,
        adds=description.adds and description.adds.name,
        token_type=description.token_type is not None,
        token_types=description.token_types and description.token_types.rows,
        embeddings=_embedding(description.embedding_of_texts) or None,
        diffuses=description.diffuses,
        encoder_layers=description.source and description.source.encoder.n_layers,
    )


def _embedding(of: Embedding | None) -> Facts | None:
    if of is None:
        return None
    return _known(
        pooling=of.pooling,
        matrices=len(of.dense) or None,
        scores=of.scorer and of.scorer.labels,
        labels=", ".join(of.labels) or None,
    )


def _block(block: Block) -> list[Facts]:
    """The networks of a block; the last one also describes what happens to their sum."""
    networks = [_branch(branch) for branch in block.branches]
    if (of := block.transformer) is not None:
        shared = _network(of.attention), _network(of.ffn)
        networks = [*({**each, "before_the_next": True} for each in shared), *networks]
    networks[0] |= _known(norm_of_stream=_norm(block.stream_norm))
    networks[-1] |= _known(
        norm_of_sum=_norm(block.post_norm),
        scale_of_sum=_other_than(block.scale, 1.0),
        recalls_streams=block.recalls is not None,
        hyper_connection=block.hyper is not None,
        banks_stream=block.banks,
        sum_with_stream=block.sums_stream,
    )
    return networks


def _branch(branch: Branch) -> Facts:
    return {
        **_network(branch.network),
        **_known(
            norm=_norm(branch.norm),
            norm_after=_norm(branch.post_norm),
            reads_layer_input=branch.reads_layer_input,
            reads_sibling=branch.reads_sibling,
        ),
    }


def _network(network: Network) -> Facts:
    match network:
        case Attention():
            return {"kind": "attention", **_attention(network)}
        case Recurrent():
            return _recurrent(network)
        case Dense():
            return {"kind": "feed-forward", **_dense(network)}
        case Mixture():
            return {"kind": "experts", **_mixture(network)}
        case Linear():
            return {"kind": "matrix"}
        case Activation():
            return {"kind": "activation", "of": _activation(network)}


def _recurrent(network: Recurrent) -> Facts:
    match network:
        case ShortConv():
            return {"kind": "short convolution", **_convolution(network.conv)}
        case Recurrence():
            return {"kind": _recurrence_kind(network), **_recurrence(network)}
        case Selective():
            return {"kind": "selective scan", **_selective(network)}
        case KimiDelta():
            return {"kind": "delta rule by channel", **_kimi_delta(network)}
        case Lightning():
            return {"kind": "lightning attention", **_lightning(network)}
        case _:
            return {"kind": network.kind, "state": sum(network.state.values())}


def _attention(of: Attention) -> Facts:
    norm, compression = of.qk_norm, of.compression
    usual = 1.0 / math.sqrt(of.key_dim)
    index = of.indexer if compression is None else compression.index
    return _known(
        heads=of.heads,
        kv_heads=_other_than(of.kv_heads, of.heads),
        dim=of.key_dim,
        value_dim=_other_than(of.value_dim, of.key_dim),
        window=of.window or (compression and compression.window),
        chunk=of.chunk,
        rope=_rope(of.rope),
        alibi=of.max_bias,
        to_both_sides=not of.causal,
        bias_by_distance=of.relative and of.relative.buckets,
        bias=any(linear is not None and linear.bias is not None for linear in (of.q, of.k, of.v)),
        qk_norm=norm and _norm(norm.q),
        qk_norm_of=_other_than("row" if norm and norm.over == "row" else "head", "head"),
        qk_norm_after_rope=norm is not None and norm.after_rope,
        v_norm=of.v_norm and _norm_text(of.v_norm),
        values_are_keys=of.k is not None and of.v is None,
        scale=None if math.isclose(of.scale, usual, rel_tol=1e-6) else of.scale,
        softcap=of.softcap,
        sinks=of.sinks is not None,
        clamp=of.clamp,
        temperature=of.temperature and of.temperature.scale,
        gate=of.gate and of.gate.activation,
        value_scale=_other_than(of.value_scale, 1.0),
        cache_of_layer=of.shares_cache_of,
        latent_vector=of.latent and of.latent.down.rows,
        selects=of.indexer and of.indexer.most,
        index_heads=index and index.heads,
        index_dim=index and index.dim,
        index_pool=_other_than(of.indexer.pool if of.indexer else 1, 1),
        selects_as_before=of.follows_indexer,
        norm_of_result=_norm(of.norm),
        to_encoder=of.cross is not None,
    ) | ({} if compression is None else _compression(compression))


def _compression(of: Compression) -> Facts:
    index = of.index
    return _known(
        tokens_of_a_block=of.blocks and of.blocks.ratio,
        blocks_selected=index and index.most // index.pool,
        output_groups=of.groups,
        output_rank=of.o_down.rows // of.groups,
    )


def _convolution(of: Convolution) -> Facts:
    return _known(channels=of.channels, taps=of.taps, bias=of.bias is not None)


def _recurrence_kind(of: Recurrence) -> str:
    return "state space" if of.beta is None else "gated delta rule"


def _recurrence(of: Recurrence) -> Facts:
    return _known(
        heads=of.heads,
        key_heads=_other_than(of.key_heads, of.heads),
        key_dim=of.key_dim,
        value_dim=_other_than(of.value_dim, of.key_dim),
        convolution=_convolution(of.conv),
        norm_of_result=_norm(of.norm),
        state=sum(of.state.values()),
    )


def _selective(of: Selective) -> Facts:
    return _known(
        heads=of.heads,
        convolution=_convolution(of.conv),
        size=of.size,
        rank=of.low.rows,
        norm_of_parts=_norm(of.b_norm),
        state=sum(of.state.values()),
    )


def _kimi_delta(of: KimiDelta) -> Facts:
    return _known(
        heads=of.heads,
        dim=of.dim,
        convolutions=_convolution(of.q.conv),
        rank=of.decay_low and of.decay_low.rows,
        floor=of.floor,
        norm_of_result=_norm(of.norm),
        state=sum(of.state.values()),
    )


def _lightning(of: Lightning) -> Facts:
    return _known(
        heads=of.heads,
        dim=of.dim,
        norm_of_result=_norm(of.norm),
        state=sum(of.state.values()),
    )


def _rope(rope: RopeConfig | None) -> Facts | None:
    if rope is None:
        return None
    scaling = rope.scaling
    return _known(
        kind=rope.style,
        dim=rope.dim,
        base=rope.freq_base,
        factor=_other_than(scaling.factor, 1.0),
        yarn=scaling.ext_factor,
        magnitude=_other_than(scaling.magnitude, 1.0),
        factors=rope.factors is not None,
        long_factors=rope.long_factors is not None,
    )


def _dense(of: Dense) -> Facts:
    return _known(
        width=of.width,
        activation=_activation(of.activation),
        gated=of.gate is not None,
        bias=of.up.bias is not None,
        divisors=of.divisors is not None,
        norm_of_inner=_norm(of.norm),
        deviations=of.deviations,
    )


def _mixture(of: Mixture) -> Facts:
    router = of.router
    return _known(
        experts=router.experts,
        used=router.used,
        width=of.width,
        activation=_activation(of.activation),
        gated=of.gate is not None,
        bias=of.up.bias is not None,
        scores=router.scoring,
        chosen_by_token=router.by_token is not None,
        groups=_other_than(router.groups, 1),
        groups_used=_other_than(router.groups_used, router.groups),
        by_best=router.by_best,
        normalised=router.normalize,
        weight_scale=_other_than(router.scale, 1.0),
        router_reads=_other_than(router.reads, "input"),
        weighs_input=of.weigh_input,
        latent_vector=of.latent and of.latent.down.rows,
        shared=of.shared and _dense(of.shared),
        chunks=of.chunks and _mixture(of.chunks),
        chunk_scale=_other_than(of.chunk_scale, 1.0),
    )


def _end(layer: LayerConfig) -> Facts:
    """What a layer does after its blocks."""
    return _known(
        embedding=layer.embedding is not None,
        altup=layer.altup is not None,
        output_scale=layer.output_scale is not None,
        output_norm=_norm(layer.output_norm),
        saves=layer.saves,
        adds=layer.adds,
    )


def _activation(of: Activation) -> str:
    return f"{of.kind} up to {of.limit:g}" if of.limit else of.kind


def _norm(of: Normalization | None) -> str | None:
    return None if of is None else _norm_text(of.norm)


def _norm_text(norm: Norm) -> str:
    """ "rms 1e-05": kind and epsilon, and any deviation from a norm with weights only."""
    parts = [norm.kind, f"{norm.eps:g}"]
    parts += ["without weights"] if not norm.weight else []
    parts += ["with bias"] if norm.bias else []
    return " ".join(parts)


def _other_than(value: Any, usual: Any) -> Any:
    return None if value == usual else value


def _known(**facts: Any) -> Facts:
    """The facts with a value. Layer 0 counts as a value, a softcap of 0 does not."""
    nothing = (None, False, 0.0)
    return {
        key: value
        for key, value in facts.items()
        if (key == "cache_of_layer" and value is not None) or value not in nothing
    }
