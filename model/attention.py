"""Attention in a plan: keys and values appended, then each row attends to its sequence.

``incremental_attention_into`` is what a layer calls. Which kernel serves it is decided when the
plan is built, by ``ptxgen.attention_choice`` from the shape, the length bucket and the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.errors import ModelError
from urdir.model.kv_cache import KvCache, PagedKvCache
from urdir.model.rows import Rows
from urdir.ptxgen.attention_choice import decode_attention, length_buckets
from urdir.ptxgen.kernels.flash_decode import FlashDecodeChunk
from urdir.ptxgen.kernels.kv_append import KvAppend
from urdir.ptxgen.kernels.prefill_attention import PrefillAttention
from urdir.ptxgen.kv_layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan


def incremental_attention_into(
    plan: Plan,
    label: str,
    cache: KvCache,
    layer: int,
    heads: int,
    rows: Rows,
    work: Mapping[str, Slice],
    out: Slice,
    *,
    sm_count: int,
    exact: bool = False,
) -> None:
    """Append ``work["k"]``, ``work["v"]`` (rows, kv_heads, head_dim) to the cache and attend with
    ``work["q"]`` (rows, heads, head_dim) into ``out`` (rows, heads, head_dim), all f32.

    A row at position p attends to positions 0 ... p of its sequence. Works for every length, batch
    and cache; a paged cache is gathered through its block table. ``exact`` keeps f32 throughout.
    """
    layout = cache.layout
    plan.launch(
        KvAppend(layout, rows.count),
        f"{label}.kv_append",
        k=work["k"],
        v=work["v"],
        **cache.arguments(layer),
        **rows.arguments,
    )
    if rows.is_prompt and not exact:
        flash_attention_multi_head(plan, label, cache, layer, heads, rows, work["q"], out)
        return
    kernel = decode_attention(heads, layout, rows.keys, sm_count, rows=rows.count)
    if isinstance(kernel, FlashDecodeChunk):
        flash_decoding_graphed(plan, label, kernel, cache, layer, rows, work, out)
        return
    arguments = {**cache.arguments(layer), **rows.arguments}
    plan.launch(kernel, label, q=work["q"], **arguments, out=out)


def incremental_attention_async(
    plan: Plan,
    label: str,
    cache: KvCache,
    layer: int,
    heads: int,
    rows: Rows,
    work: Mapping[str, Slice],
    *,
    sm_count: int,
    exact: bool = False,
) -> Slice:
    """The same into the workspace: returns ``work["heads"]``, where the result will be."""
    out = work["heads"]
    incremental_attention_into(
        plan, label, cache, layer, heads, rows, work, out, sm_count=sm_count, exact=exact
    )
    return out


def paged_attention_into(
    plan: Plan,
    label: str,
    cache: PagedKvCache,
    layer: int,
    heads: int,
    rows: Rows,
    work: Mapping[str, Slice],
    out: Slice,
    *,
    sm_count: int,
) -> None:
    """``incremental_attention_into`` on a paged cache: K and V gathered through the block table.

    Equal to a contiguous cache, bit for bit, for any table: permuted pages, a partial last page,
    pages shared by sequences. Raises ModelError for a cache that is not paged.
    """
    if not cache.layout.is_paged:
        raise ModelError(f"{label}: paged attention needs a paged KV cache, this one is contiguous")
    incremental_attention_into(plan, label, cache, layer, heads, rows, work, out, sm_count=sm_count)


def flash_decoding_graphed(
    plan: Plan,
    label: str,
    kernel: FlashDecodeChunk,
    cache: KvCache,
    layer: int,
    rows: Rows,
    work: Mapping[str, Slice],
    out: Slice,
) -> None:
    """Attend only, split over chunks of keys: two launches, ``kernel``'s and their merge.

    Partial results go to ``work["partial"]`` and ``work["softmax"]`` (see ``partial_sizes``).
    """
    partial = {name: work[name] for name in ("partial", "softmax")}
    plan.launch(
        kernel,
        f"{label}.chunks",
        q=work["q"],
        **cache.arguments(layer),
        **rows.arguments,
        **partial,
    )
    plan.launch(kernel.reduce, label, **partial, out=out)


def flash_attention_multi_head(
    plan: Plan,
    label: str,
    cache: KvCache,
    layer: int,
    heads: int,
    rows: Rows,
    q: Slice,
    out: Slice,
) -> None:
    """Causal attention of consecutive tokens of one sequence (a prompt or a chunk of one), whose
    keys and values are in the cache: tiled, on tensor cores, without a matrix of scores.

    ``q`` and ``out`` are (rows, heads, head_dim) f32.
    """
    arguments = {**cache.arguments(layer), **rows.arguments}
    plan.launch(PrefillAttention(heads, cache.layout, rows.count), label, q=q, **arguments, out=out)


def key_bucket(keys: int, max_len: int) -> int:
    """The length bucket of a step whose longest row attends to ``keys`` keys."""
    return next(bucket for bucket in length_buckets(max_len) if bucket >= keys)


def partial_sizes(heads: int, layout: KvLayout, rows: int, sm_count: int) -> dict[str, int]:
    """Bytes of the partial results of split attention: the most that a step of up to ``rows`` rows
    (a power of two) needs in any length bucket.
    """
    sizes = {"partial": 16, "softmax": 16}  # where no bucket is split: never touched
    for bucket in length_buckets(layout.max_len):
        for count in (1 << power for power in range(rows.bit_length())):
            kernel = decode_attention(heads, layout, bucket, sm_count, rows=count)
            if isinstance(kernel, FlashDecodeChunk):
                for name, size in sizes.items():
                    sizes[name] = max(size, kernel.nbytes(kernel.param(name)))
    return sizes
