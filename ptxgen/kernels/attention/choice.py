"""Which kernel serves decode attention: a function of the shape, the length bucket and the device.

A plan is built for a length bucket; the choice is made then and never looks at device state.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.ptxgen.kernels.attention.decode_cta import STAGES
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.spec import ceil_div

#: The shortest bucket, and how much longer each is than the one before.
FIRST_BUCKET, BUCKET_RATIO = 512, 4
#: Up to this many keys a row is not split.
INCREMENTAL_KEYS = 512
#: Up to this many keys split attention has one CTA an SM, with a deep ring, above two.
DEEP_KEYS = 4096
#: Stages of a deep ring, at most.
DEEP_STAGES = 6
#: Keys of a chunk: at least these, and at most these where rows are several (see `FlashDecode`).
LEAST_KEYS, MOST_KEYS = 32, 1024


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


def decode_attention(
    heads: int,
    layout: KvLayout,
    max_keys: int,
    sm_count: int,
    *,
    rows: int = 1,
    scores: Scores = PLAIN,
    token: OwnToken | None = None,
    shared_per_sm: int = 0,
) -> IncrementalAttention | FlashDecode:
    """The kernel for rows with positions below ``max_keys``, a bucket.

    Incremental attention for few keys (a window bounds them too), flash decoding otherwise. With a
    ``token`` the kernel prepares and appends the rows' own tokens, too; the choice is the same.
    Raises PtxgenError for shapes that no kernel handles.
    """
    incremental = IncrementalAttention(heads, layout, rows, scores, token)
    if min(scores.span or max_keys, max_keys) <= INCREMENTAL_KEYS:
        return _spread(incremental, sm_count)
    return split_attention(incremental, max_keys, sm_count, shared_per_sm)


def split_attention(
    whole: IncrementalAttention, max_keys: int, sm_count: int, shared_per_sm: int = 0
) -> FlashDecode:
    """Flash decoding of what ``whole`` computes, for rows with positions below ``max_keys``."""
    keys = min(whole.scores.span or max_keys, max_keys)
    is_deep = whole.rows == 1 and keys <= DEEP_KEYS
    split = FlashDecode(
        whole.heads,
        whole.layout,
        whole.rows,
        whole.scores,
        whole.token,
        ctas=max(1, (1 if is_deep else 2) * sm_count // (whole.layout.kv_heads * whole.tiles)),
        least=LEAST_KEYS,
        most=0 if whole.rows == 1 else MOST_KEYS * ceil_div(whole.rows, 32),
    )
    return _deepened(split, shared_per_sm) if is_deep else split


def _deepened(spec: FlashDecode, shared_per_sm: int) -> FlashDecode:
    """The same with a ring as deep as fits beside the CTAs of the launches before and after it,
    which leave 4 / 9 of an SM's shared memory (`linear.choice.Limits`)."""
    for stages in range(DEEP_STAGES, STAGES, -1):
        deeper = replace(spec, stages=stages)
        if deeper.launch_shape.shared_bytes <= shared_per_sm * 4 // 9 - 1024:
            return deeper
    return spec


def _spread(spec: IncrementalAttention, sm_count: int) -> IncrementalAttention:
    """The same with fewer query heads a CTA, as long as every CTA has an SM to itself: it then has
    less work for a key, and keys that are read again come from the L2 cache."""
    for heads in (2, 1):
        fewer = replace(spec, most_heads=heads)
        if spec.layout.kv_heads * spec.rows * fewer.tiles > sm_count:
            break
        spec = fewer
    return spec
