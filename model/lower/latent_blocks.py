"""Prompts by a latent vector, chunked: cached latents are expanded to keys and values of heads, a
block of tokens after another (`memory.walk`), and the rows attend to each block.

That takes (`Attention.written_out`) a quarter of the work of attention to the latents themselves,
and memory for one block, whatever the sequences' lengths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.families.attention import Attention
from urdir.model.graph.latent import AttendLatent
from urdir.model.lower.attend import LayerAttention, append_keys_alone, append_tokens
from urdir.model.lower.latent_heads import (
    WRITTEN_KEYS,
    WRITTEN_PARTIAL,
    WRITTEN_SEQUENCE,
    WRITTEN_SOFTMAX,
    WRITTEN_VALUES,
    append_whole_queries,
)
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.packed import append_packed_heads
from urdir.model.lower.requests import packs
from urdir.model.lower.rows import RowsWalk
from urdir.model.lower.vectors import rows_of
from urdir.ptxgen.kernels.attention.cached_tokens import CachedTokens
from urdir.ptxgen.kernels.attention.choice import block_attention
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock

# One object for equal kernels, of all blocks and layers.
_cached_tokens = lru_cache(maxsize=64)(CachedTokens)
_block_attention = lru_cache(maxsize=64)(block_attention)


def block_kernel(at: Lowering, of: AttendLatent, own: Attention) -> PrefillBlock | None:
    """The kernel by which the rows of prompts attend to a block of keys and values of heads; None
    where they attend to latent vectors."""
    assert of.of.keys is not None
    assert at.rows.walk is not None
    matrices = (at.matrix(of.of.keys), at.matrix(of.of.expand))
    if not packs(at, at.rows.count, matrices):
        return None
    return _block_attention(
        own.heads,
        (own.key_dim, own.value_dim),
        at.parts.cache.layout(of.layer).max_len,
        at.rows.walk.blocks.room,
        at.rows.prompt,
        at.limits.target,
        scores=own.scores,
    )


def append_blocks(
    at: Lowering, of: AttendLatent, kernel: PrefillBlock, own: LayerAttention, first: int
) -> Slice:
    """The heads of the prompts' attention, of the parts of queries, key and value. Keys go into the
    cache as ``own`` says, which is of these rows alone. In the workspace they begin with row
    ``first``."""
    work, rows, walk = at.work, own.rows, own.rows.walk
    assert walk is not None
    append_keys_alone(at.plan, own)
    append_whole_queries(at, of, rows.count, kernel.head_dim, work["q"], first)
    layout = replace(kernel.layout, max_len=own.layout.max_len)
    token = replace(own.token, appends=False)
    queries = replace(own, layout=layout, token=token, work={"q": work["q"]})
    append_tokens(at.plan, queries)
    # tokens of a block pass through the buffer for packed vectors, so that heads are not there
    out = rows_of(work["expanded"], first, rows.count, kernel.heads * kernel.value_dim)
    for key in range(0, walk.blocks.tokens, walk.blocks.length):
        _append_expanded(at, of, kernel, own, walk, key)
        at.launch(
            kernel,
            of.name("attention.block"),
            count=rows.count,
            first=key,
            length=walk.blocks.length,
            q=work["q"],
            k_cache=work[WRITTEN_KEYS],
            v_cache=work[WRITTEN_VALUES],
            sequence=work.zeroed(WRITTEN_SEQUENCE),
            position=rows.position,
            begin=walk.begin,
            partial=work[WRITTEN_PARTIAL],
            softmax=work[WRITTEN_SOFTMAX],
            out=out.slice(0, nbytes_of(kernel, "out")),
        )
    return out


def _append_expanded(
    at: Lowering,
    of: AttendLatent,
    kernel: PrefillBlock,
    own: LayerAttention,
    walk: RowsWalk,
    first: int,
) -> None:
    """Keys and values of heads of the block of the walk from key ``first`` on, of what is
    cached."""
    work, mixer = at.work, of.mixer
    assert of.of.keys is not None
    rotated, blocks = mixer.key_dim - mixer.value_dim, walk.blocks
    keys, values, unit = work[WRITTEN_KEYS], work[WRITTEN_VALUES], kernel.cta.key_tile
    read = _cached_tokens(
        *(own.layout, blocks.length, unit, rotated, kernel.heads, kernel.head_dim, blocks.room)
    )
    given = {
        param.name: own.caches[param.name] for param in read.params if param.name in own.caches
    }
    at.launch(
        read,
        of.name("attention.read"),
        **given,
        length=blocks.length,
        units=walk.units.slice(16 * first // unit, 16 * blocks.length // unit),
        keys=keys,
        tail=work["v"],
    )
    products = [(at.matrix(of.of.keys), keys), (at.matrix(of.of.expand), values)]
    key_dim, value_dim = kernel.head_dim, kernel.value_dim
    places = (
        HeadPlaces(key_dim - rotated, rotated, key_dim, blocks.room),
        HeadPlaces(value_dim, 0, value_dim, blocks.room),
    )
    label = of.name("attn_kv_b")
    append_packed_heads(at, label, products, work["v"], blocks.length, places)
