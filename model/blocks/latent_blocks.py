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
from urdir.model.families.attention import Attention
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
from urdir.ptxgen.kernels.attention.write_heads import WriteHeads

if TYPE_CHECKING:
    from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock

# One object for equal kernels, of all blocks and layers.
_cached_tokens = lru_cache(maxsize=64)(CachedTokens)
_write_heads = lru_cache(maxsize=64)(WriteHeads)
_block_attention = lru_cache(maxsize=64)(block_attention)

#: From this many rows on: each step writes all cached tokens out, however few its rows are.
LEAST_ROWS = 64


def block_kernel(at: LayerStep, written: Attention) -> PrefillBlock | None:
    """The kernel by which the rows attend to a block of keys and values of heads; None where they
    attend to latent vectors."""
    if at.rows.count < LEAST_ROWS:
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
    latent, work, layout = mixer.latent, at.work, kernel.layout
    assert latent is not None
    assert latent.keys is not None
    rotated, count = mixer.key_dim - mixer.value_dim, layout.max_len
    read = _cached_tokens(own.layout, count, at.rows.count, rotated)
    assert at.rows.segment is not None
    given = {name: of for name, of in own.caches.items() if name != "v_cache"}
    at.plan.launch(
        read,
        at.name("attention.read"),
        first=first,
        **given,
        **at.rows.arguments,
        segment=at.rows.segment,
        head=work["k rotated"],
        tail=work["v"],
    )
    still, values = work["q still"], work["expanded"]
    products = [(at.matrix(latent.keys), still), (at.matrix(latent.expand), values)]
    linear = replace(at.linear, rows=count)
    linear.append(at.name("attn_kv_b"), products, Activations(work["v"]))
    at.plan.launch(
        _write_heads(layout, rotated),
        at.name("attention.written"),
        head=work["k rotated"],
        still=still,
        v=values,
        k_cache=work[WRITTEN_KEYS],
        v_cache=work[WRITTEN_VALUES],
    )
