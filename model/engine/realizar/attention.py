"""Attention on the caller's buffers: q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim),
out (rows, heads, head_dim), all f32 in device memory.

A row is the next token of one of ``sequences``. Nothing waits for the device. Every operation
returns the lengths of its sequences after it, and refuses invalid arguments before anything runs:
LaunchError (launch and parameter by name) for a buffer that is null, closed, too small or of
another device, ContextFullError for a full cache. Lengths and caches are then unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.driver.plan import Plan
from urdir.model.engine.realizar.cached import CachedAttention, Launcher, Operation
from urdir.model.errors import ModelError
from urdir.model.lower import attend
from urdir.ptxgen.kernels.attention.choice import split_attention
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention

if TYPE_CHECKING:
    from urdir.driver.memory import Region


def incremental_attention_into(
    to: Launcher[CachedAttention],
    layer: int,
    q: Region,
    k: Region,
    v: Region,
    out: Region,
    *,
    sequences: Sequence[int] = (0,),
) -> list[int]:
    """Append k and v to the layer's cache; each row attends to all that its sequence then has."""
    at = to.attention
    work = at.layer(layer, at.rows(layer, sequences), q=q, k=k, v=v)
    plan = Plan("incremental attention")
    attend.incremental_attention_into(plan, work, out)
    return to.submit(Operation(plan, layer, tuple(sequences), 1))


def incremental_attention_async(
    to: Launcher[CachedAttention],
    layer: int,
    q: Region,
    k: Region,
    v: Region,
    *,
    sequences: Sequence[int] = (0,),
) -> tuple[Region, list[int]]:
    """The same into a buffer of the cache's own, which the next call of this function, for any
    layer, writes again; returns it too."""
    at = to.attention
    at.rows(layer, sequences)
    out = at.work["heads"].slice(0, 4 * len(sequences) * at.heads * at.layout.head_dim, "heads")
    return out, incremental_attention_into(to, layer, q, k, v, out, sequences=sequences)


def paged_attention_into(
    to: Launcher[CachedAttention],
    layer: int,
    q: Region,
    k: Region,
    v: Region,
    out: Region,
    *,
    sequences: Sequence[int] = (0,),
) -> list[int]:
    """``incremental_attention_into`` on a paged cache: K and V gathered through the block table.

    Equal to a contiguous cache, bit for bit, for any table. Raises ModelError for a cache without
    pages.
    """
    if not to.attention.layout.is_paged:
        raise ModelError(f"layer {layer}: the KV cache is contiguous, paged attention needs pages")
    return incremental_attention_into(to, layer, q, k, v, out, sequences=sequences)


def flash_decoding_graphed(
    to: Launcher[CachedAttention],
    layer: int,
    q: Region,
    out: Region,
    *,
    k: Region | None = None,
    v: Region | None = None,
    sequences: Sequence[int] = (0,),
) -> list[int]:
    """Attention split over chunks of keys, whatever the length.

    With k and v these are appended before, and q and k rotated in place where the cache has a rope.
    Without them q, rotated already, attends to what is stored.
    """
    at = to.attention
    rows = at.rows(layer, sequences)
    work = at.layer(layer, rows, q=q, k=k, v=v)
    whole = IncrementalAttention(at.heads, at.layout, rows.count)
    kernel = split_attention(whole, rows.keys, at.device.properties.sm_count)
    plan = Plan("flash decoding")
    appends = k is not None or v is not None
    if appends:
        attend.append_tokens(plan, work)
    work.launch(plan, kernel, work.label, out=out)
    return to.submit(Operation(plan, layer, tuple(sequences), int(appends)))


def flash_attention_multi_head(
    to: Launcher[CachedAttention],
    layer: int,
    q: Region,
    k: Region,
    v: Region,
    out: Region,
    *,
    tokens: int,
    sequence: int = 0,
) -> list[int]:
    """Causal attention of the next ``tokens`` tokens of one sequence (a prompt or a part of one),
    which are appended first: tiled, on tensor cores, without a matrix of scores.

    q and k are rotated in place where the cache has a rope. Queries and probabilities are rounded
    to f16.
    """
    at = to.attention
    work = at.layer(layer, at.rows(layer, (sequence,), tokens), q=q, k=k, v=v)
    plan = Plan("flash attention")
    attend.append_tokens(plan, work)
    attend.flash_attention_multi_head(plan, work, out)
    return to.submit(Operation(plan, layer, (sequence,), tokens))
