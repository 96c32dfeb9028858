"""Which kernel serves attention: a function of the shape, the length bucket and the device.

A plan is built for a length bucket; the choice is made then and never looks at device state.
"""

from __future__ import annotations

import math
from dataclasses import replace

from urdir.ptxgen.kernels.attention.flash_decode import FlashDecodeChunk
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.prompt import PromptAttention
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores

#: The shortest bucket, and how much longer each is than the one before.
FIRST_BUCKET, BUCKET_RATIO = 512, 4
#: Up to this many keys one CTA a KV head is as quick as two launches.
INCREMENTAL_KEYS = 512
#: CTAs an SM, from which on rows and heads alone keep the memory busy.
FULL = 4
#: CTAs an SM that flash decoding aims at for rows at the end of the bucket: as many as run there
#: at once. Measured on an H200, 32 / 8 heads of 128, f16, 32,768 keys: 61.7 % of the read bandwidth
#: with two, 57.7 % with four, 52.3 % with eight.
FLASH_CTAS = 2
#: Limits of a chunk: below, a CTA's beginning and end outweigh its keys.
MIN_CHUNK, MAX_CHUNK = 64, 1024


def length_buckets(max_len: int) -> tuple[int, ...]:
    """Rising values of max_keys, the last one ``max_len``: 512, 2048, 8192, ...

    A step whose rows all have a position below a bucket can use the plan built for it.
    """
    buckets = []
    bucket = FIRST_BUCKET
    while bucket < max_len:
        buckets.append(bucket)
        bucket *= BUCKET_RATIO
    return (*buckets, max_len)


def prompt_attention(
    heads: int,
    layout: KvLayout,
    rows: int,
    target: str,
    *,
    scores: Scores = PLAIN,
    packs: bool = False,
) -> PromptAttention:
    """The kernel for rows of prompts on a device of native target ``target``.

    wgmma where the device has it and the kernel takes the cache. ``packs`` asks for packed heads,
    which some shapes have: then the kernel ``packs``. Raises PtxgenError for shapes that no kernel
    handles.
    """
    if PrefillWgmma.serves(layout):
        kernel = PrefillWgmma(heads, layout, rows, scores)
        if kernel.target_on(target):
            return replace(kernel, packs=packs and kernel.can_pack)
    return PrefillAttention(heads, layout, rows, scores)


def decode_attention(
    heads: int,
    layout: KvLayout,
    max_keys: int,
    sm_count: int,
    *,
    rows: int = 1,
    scores: Scores = PLAIN,
    token: OwnToken | None = None,
) -> IncrementalAttention | FlashDecodeChunk:
    """The kernel for rows with positions below ``max_keys``, a bucket.

    Incremental attention for few keys (a window bounds them too) and where rows and heads make
    enough CTAs; flash decoding (its ``reduce`` follows it) otherwise, in chunks that make about
    `FLASH_CTAS` CTAs an SM. With a ``token`` the kernel prepares and appends the rows' own tokens,
    too; the choice is the same. Raises PtxgenError for shapes that no kernel handles.
    """
    incremental = IncrementalAttention(heads, layout, rows, scores, token)
    keys = min(scores.span or max_keys, max_keys)
    ctas = layout.kv_heads * incremental.tiles * rows
    if keys <= INCREMENTAL_KEYS or ctas >= FULL * sm_count:
        return _spread(incremental, sm_count)
    return split_attention(incremental, max_keys, sm_count)


def split_attention(whole: IncrementalAttention, max_keys: int, sm_count: int) -> FlashDecodeChunk:
    """Flash decoding of what ``whole`` computes, for rows with positions below ``max_keys``, in
    chunks that make about `FLASH_CTAS` CTAs an SM."""
    keys = min(whole.scores.span or max_keys, max_keys)
    wanted = keys * whole.layout.kv_heads * whole.tiles * whole.rows / (FLASH_CTAS * sm_count)
    chunk = min(MAX_CHUNK, max(MIN_CHUNK, 1 << max(0, round(math.log2(wanted)))))
    return FlashDecodeChunk(
        whole.heads,
        whole.layout,
        whole.rows,
        whole.scores,
        whole.token,
        max_keys=max_keys,
        chunk=chunk,
    )


def _spread(spec: IncrementalAttention, sm_count: int) -> IncrementalAttention:
    """The same with fewer query heads a CTA, as long as every CTA has an SM to itself: it then has
    less work for a key, and keys that are read again come from the L2 cache."""
    for heads in (2, 1):
        fewer = replace(spec, most_heads=heads)
        if spec.layout.kv_heads * spec.rows * fewer.tiles > sm_count:
            break
        spec = fewer
    return spec


def fills_sms(keys: int) -> bool:
    """Whether the launch after attention over ``keys`` keys puts idle CTAs on SMs it does not need.

    On an SM without a CTA the launch after it would put two, and take as long as these. It does so
    after split attention: 397 tokens/s with idle CTAs, 361 without, at 32,768 keys (8B Q4_K_M on
    an H200). After incremental attention idle CTAs only cost time: 728 with, 732 without.
    """
    return keys > INCREMENTAL_KEYS
