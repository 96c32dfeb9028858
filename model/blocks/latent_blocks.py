"""Rows of a prompt after others, by a latent vector: the cached vectors are written out as keys and
values of heads, a block of tokens after another, and the rows attend to each block.

That takes (`Attention.written_out`) a quarter of the work of attention to the vectors themselves,
and memory for one block, whatever the sequence's length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.attention import LayerAttention, append_keys_alone, append_tokens
from urdir.model.blocks.latent_heads import append_latent_parts, append_whole_queries
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.attention import Attention, Latent
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.workspace import (
    WRITTEN_KEYS,
    WRITTEN_PARTIAL,
    WRITTEN_SEQUENCE,
    WRITTEN_SOFTMAX,
    WRITTEN_VALUES,
)
from urdir.ptxgen.kernels.attention.cached_tokens import CachedTokens
from urdir.ptxgen.kernels.attention.choice import block_attention
from urdir.ptxgen.kernels.linear.packed_parts import HeadPlaces

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock

# One object for equal kernels, of all blocks and layers.
_cached_tokens = lru_cache(maxsize=64)(CachedTokens)
_block_attention = lru_cache(maxsize=64)(block_attention)


def block_kernel(at: LayerStep, latent: Latent, written: Attention) -> PrefillBlock | None:
    """The kernel by which the rows attend to a block of keys and values of heads; None where they
    attend to latent vectors."""
    assert latent.keys is not None
    matrices = (at.matrix(latent.keys), at.matrix(latent.expand))
    if not at.linear.packs(*matrices):
        return None
    return _block_attention(
        written.heads,
        (written.key_dim, written.value_dim),
        at.parts.cache.layout(at.index).max_len,
        at.work[WRITTEN_SEQUENCE].nbytes // 4,
        at.rows.count,
        at.parts.device.native_target,
        scores=written.scores,
    )


def append_blocks(
    at: LayerStep,
    mixer: Attention,
    kernel: PrefillBlock,
    x: Activations,
    norm: NormLayer | None,
    own: LayerAttention,
) -> Activations:
    """The heads of the rows' attention, of the norm of x, whose latent vectors and rotated parts go
    into the cache first, as ``own`` says."""
    latent, work = mixer.latent, at.work
    assert latent is not None
    append_latent_parts(at, mixer, latent, x, norm)
    append_keys_alone(at.plan, own)
    append_whole_queries(at, mixer, kernel.head_dim)
    layout = replace(kernel.layout, max_len=own.layout.max_len)
    queries = replace(own, layout=layout, token=replace(own.token, appends=False))
    append_tokens(at.plan, queries)
    # also where heads are packed: tokens of a block pass through the buffer for packed vectors
    out = work["heads"].slice(0, kernel.nbytes(kernel.param("out")))
    for first in range(0, at.rows.keys, kernel.layout.max_len):
        _append_written(at, mixer, kernel, own, first)
        at.plan.launch(
            kernel,
            at.name("attention.block"),
            first=first,
            q=work["q"],
            k_cache=work[WRITTEN_KEYS],
            v_cache=work[WRITTEN_VALUES],
            sequence=work[WRITTEN_SEQUENCE],
            position=at.rows.position,
            partial=work[WRITTEN_PARTIAL],
            softmax=work[WRITTEN_SOFTMAX],
            out=out,
        )
    return Activations(out, packed=out if kernel.packs else None)


def _append_written(
    at: LayerStep, mixer: Attention, kernel: PrefillBlock, own: LayerAttention, first: int
) -> None:
    """Keys and values of heads of the block of tokens from ``first`` on, of what is cached."""
    latent, work = mixer.latent, at.work
    assert latent is not None
    assert latent.keys is not None
    rotated, count = mixer.key_dim - mixer.value_dim, kernel.layout.max_len
    keys, values = work[WRITTEN_KEYS], work[WRITTEN_VALUES]
    read = _cached_tokens(own.layout, count, at.rows.count, rotated, kernel.heads, kernel.head_dim)
    assert at.rows.segment is not None
    given = {name: of for name, of in own.caches.items() if name != "v_cache"}
    at.plan.launch(
        read,
        at.name("attention.read"),
        first=first,
        **given,
        **at.rows.arguments,
        segment=at.rows.segment,
        keys=keys,
        tail=work["v"],
    )
    products = [(at.matrix(latent.keys), keys), (at.matrix(latent.expand), values)]
    key_dim, value_dim = kernel.head_dim, kernel.value_dim
    places = (
        HeadPlaces(key_dim - rotated, rotated, key_dim),
        HeadPlaces(value_dim, 0, value_dim),
    )
    linear = replace(at.linear, rows=count)
    linear.append_heads(at.name("attn_kv_b"), products, Activations(work["v"]), places)
