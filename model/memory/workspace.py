"""The intermediates of a step: one arena, sized for the largest plan, reused by every layer."""

from __future__ import annotations

from collections.abc import Iterable

from urdir.model.families.description import Config
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.attention.choice import decode_attention, length_buckets
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecodeChunk
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.linear.summary import SUMMARY
from urdir.ptxgen.spec import ceil_div


def workspace_sizes(
    config: Config, layout: KvLayout, rows: int, chunk: int, sm_count: int, exact: bool
) -> dict[str, int]:
    """Bytes of every intermediate, for decode steps of ``rows`` and prompts of ``chunk``.

    All are f32 but the ranks, u64. ``scaled`` and ``summary`` are for as many rows as products of
    few rows take. Logits and their ranks exist for decode rows only, and so do the partial
    results of split attention, which depend on how many SMs the device has; with ``exact``
    arithmetic that attention serves prompts, too.
    """
    c, most = config, max(rows, chunk)
    mixers = [layer.mixer for layer in c.layers]
    ffn = max(layer.ffn.width for layer in c.layers)
    widths = {
        "hidden": c.hidden,
        "residual": c.hidden,
        "normed": c.hidden,
        "q": max(mixer.query_width for mixer in mixers),
        "k": max(mixer.key_width for mixer in mixers),
        "v": max(mixer.value_width for mixer in mixers),
        "heads": max(mixer.output_width for mixer in mixers),
        "delta": c.hidden,
        "gate": ffn,
        "up": ffn,
        "activated": ffn,
    }
    sizes = {name: 4 * width * most for name, width in widths.items()}
    few = min(rows, MAX_BATCH)
    sizes["scaled"] = 4 * c.hidden * few
    sizes["summary"] = 4 * 2 * ceil_div(c.hidden, SUMMARY) * few
    sizes["logits"] = 4 * c.vocab_size * rows
    sizes["ranks"] = 8 * Argmax(n=c.vocab_size).slices * rows
    heads = max(mixer.heads for mixer in mixers)
    return sizes | partial_sizes(heads, layout, most if exact else rows, sm_count)


def partial_sizes(heads: int, layout: KvLayout, rows: int, sm_count: int) -> dict[str, int]:
    """Bytes of the partial results of split attention: the most that a step of up to ``rows`` rows
    (a power of two) needs in any length bucket.
    """
    return most_partial(
        decode_attention(heads, layout, bucket, sm_count, rows=count)
        for bucket in length_buckets(layout.max_len)
        for count in (1 << power for power in range(rows.bit_length()))
    )


def most_partial(kernels: Iterable[IncrementalAttention | FlashDecodeChunk]) -> dict[str, int]:
    """Bytes of the partial results that any of these kernels leaves."""
    sizes = {"partial": 16, "softmax": 16}  # where none is split: never touched
    for kernel in kernels:
        if isinstance(kernel, FlashDecodeChunk):
            for name, size in sizes.items():
                sizes[name] = max(size, kernel.nbytes(kernel.param(name)))
    return sizes
