"""Memory for the partial results of split attention, which launches of any length may need."""

from __future__ import annotations

from collections.abc import Iterable

from urdir.driver.kernel import nbytes_of
from urdir.model.families.config import Config
from urdir.model.memory.buckets import row_buckets
from urdir.model.memory.cache_shape import CacheShape
from urdir.ptxgen.kernels.attention.choice import decode_attention, length_buckets
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention

#: Parameters of split attention, and the buffers that they take.
PARTIAL = {"partial": "partial", "softmax": "softmax", "arrived": "chunks arrived"}


def partial_sizes(
    config: Config, cache: CacheShape, rows: int, sm_count: int, runs: set[int]
) -> dict[str, int]:
    """Bytes by name: the most that a step of up to ``rows`` rows, with any of these ``runs`` of a
    sequence, needs in any length bucket."""
    shapes = {
        (mixer.heads, mixer.scores, cache.layout(index))
        for index, layer in enumerate(config.layers)
        if (mixer := layer.attention) is not None and mixer.compression is None
    }
    return most_partial(
        decode_attention(whole, bucket, sm_count, run=run)
        for heads, scores, layout in shapes
        for count in row_buckets(rows)
        for whole in [IncrementalAttention(heads, layout, count, scores)]
        for bucket in length_buckets(layout.max_len)
        for run in runs
    )


def most_partial(kernels: Iterable[IncrementalAttention | FlashDecode]) -> dict[str, int]:
    """Bytes of the partial results that any of these kernels leaves."""
    sizes: dict[str, int] = {}
    for kernel in kernels:
        if isinstance(kernel, FlashDecode) and kernel.split.chunks > 1:
            for param, name in PARTIAL.items():
                sizes[name] = max(sizes.get(name, 0), nbytes_of(kernel, param))
    return sizes
