"""The intermediates of a step: one arena, sized for the largest plan, reused by every layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.recurrent import (
    KimiDelta,
    Lightning,
    Recurrence,
    Recurrent,
    Selective,
    ShortConv,
)
from urdir.model.memory.buckets import row_buckets
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.walk import Walk
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.attention.choice import decode_attention, length_buckets
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.prefill_block import LANES
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.summary import SUMMARY
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.packed import packed_nbytes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena

#: Buffers for the stream: what a block reads, what it makes, and what a parallel block adds up.
STREAMS = ("hidden", "residual", "sum", "spare")

#: The stream after the layers of a stage, for the rank that has the next ones.
PASSED = "passed"

#: Parameters of split attention, and the buffers that they take.
PARTIAL = {"partial": "partial", "softmax": "softmax", "arrived": "chunks arrived"}
#: Buffers with the vectors of products.
_INPUTS = (
    *("hidden", "heads", "activated", "layer gate", "latent q", "expanded"),
    *("convolved", "low", "gate low", "expert sum", "latent"),
)

#: Keys and values of heads written out (`Attention.written_out`), f16: a cache of the sequence
#: that a step begins, or of a block of its tokens, and its number there for each row, u32.
WRITTEN_KEYS, WRITTEN_VALUES = "written keys", "written values"
WRITTEN_SEQUENCE = "written sequence"

#: What prompts carry from one block of such keys to the next (`PrefillBlock`), f32.
WRITTEN_PARTIAL, WRITTEN_SOFTMAX = "written partial", "written softmax"

#: Buffers that are zeros at first. Kernels leave them so, but for packed vectors: a product reads
#: whole tiles of a block of cached tokens, and what it makes of places beyond them is not used.
_ZEROED = frozenset({"experts arrived", "chunks arrived", WRITTEN_SEQUENCE, "packed"})


def open_workspace(device: Device, sizes: Mapping[str, int], name: str = "workspace") -> Arena:
    """An arena of these buffers, as the kernels expect them at first."""
    with ExitStack() as owners:
        work = owners.enter_context(device.arena(sizes, name))
        for buffer in _ZEROED & work.keys():
            work[buffer].fill(0)
        owners.pop_all()
    return work


def saved(name: str) -> str:
    """The buffer that keeps the stream under a name."""
    return f"saved {name}"


def workspace_sizes(
    config: Config,
    cache: CacheShape,
    rows: int,
    chunk: int,
    sm_count: int,
    exact: bool,
    drafts: int = 0,
) -> dict[str, int]:
    """Bytes of every intermediate, for steps of ``rows`` rows that choose a token, with prompts of
    ``chunk`` rows beside them; or with up to ``drafts`` drafts of each sequence among them.

    All are f32 but the ranks, u64, and packed vectors, f16. ``scaled`` and ``summary`` are for as
    many rows as products of few rows take. Logits (as they are chosen from, and as
    the model gave them) and their ranks exist for rows that choose only, and
    so do the partial results of split attention, which depend on how many SMs the device has; with
    ``exact`` arithmetic that attention serves prompts, too.
    """
    most = rows + chunk
    sizes = {name: 4 * width * most for name, width in _widths(config).items()}
    few = min(most, MAX_BATCH)
    sizes["scaled"] = 4 * config.hidden * few
    sizes["summary"] = 4 * 2 * ceil_div(config.hidden, SUMMARY) * few
    if most > MAX_BATCH and not exact:
        inputs = max(_widths(config)[name] for name in _INPUTS if name in _widths(config))
        sizes["packed"] = packed_nbytes(most, inputs)
        if "activated" in sizes:
            wide = packed_nbytes(most, _widths(config)["activated"])
            sizes["activated"] = max(sizes["activated"], wide)
        for name, nbytes in _written_sizes(config, cache, chunk).items():
            sizes[name] = max(sizes.get(name, 0), nbytes)
    if "heads" in sizes:
        sizes["output heads"] = sizes["heads"] // most * rows
    if "attention gate" in sizes:
        sizes["output gate"] = sizes["attention gate"] // most * rows
    sizes["logits"] = sizes["raw logits"] = 4 * config.vocab_size * rows
    if config.share is not None:
        sizes["own logits"] = 4 * config.output.rows * rows
    sizes["ranks"] = 8 * Argmax(n=config.vocab_size).slices * rows
    sizes |= _mixture_sizes(config, most, exact)
    sizes |= _chunk_sizes(config, cache, rows, chunk, exact)
    if exact:
        return sizes | _partial_sizes(config, cache, max(rows, chunk), sm_count, {1})
    return sizes | _partial_sizes(config, cache, rows, sm_count, {1, 1 + drafts})


def _chunk_sizes(
    config: Config, cache: CacheShape, rows: int, chunk: int, exact: bool
) -> dict[str, int]:
    """Bytes of what recurrences prepare of a prompt's chunks: the most of any."""
    if exact or not chunk or not config.recurrents:
        return {}
    from urdir.model.memory.chunk_workspace import chunk_workspace

    return chunk_workspace(config.recurrents, rows, cache.max_len, chunk)


def _written_sizes(config: Config, cache: CacheShape, rows: int) -> dict[str, int]:
    """Bytes of keys and values written out for the rows of a sequence, or a block of what is
    cached, whose vectors are read and packed."""
    mixers = [written for mixer in config.attentions if (written := mixer.written_out) is not None]
    if not mixers or not rows:
        return {}
    walk = Walk.of(config, cache.max_len, rows)
    tokens = rows if walk is None else max(rows, walk.block)
    latent = max(mixer.value_dim for mixer in config.attentions if mixer.latent is not None)
    return {
        WRITTEN_KEYS: 2 * tokens * max(mixer.key_width for mixer in mixers),
        WRITTEN_VALUES: 2 * tokens * max(mixer.value_width for mixer in mixers),
        WRITTEN_SEQUENCE: 4 * rows,
        WRITTEN_PARTIAL: 4 * rows * max(mixer.output_width for mixer in mixers),
        WRITTEN_SOFTMAX: 8 * LANES * rows * max(mixer.heads for mixer in mixers),
        "v": 4 * tokens * latent,
        "packed": packed_nbytes(tokens, latent),
    }


def _mixture_sizes(config: Config, rows: int, exact: bool) -> dict[str, int]:
    """Bytes of what mixtures need: the most of any."""
    mixtures = [mixture for layer in config.layers for mixture in layer.mixtures]
    if not mixtures:
        return {}
    from urdir.model.memory.mixture_workspace import mixture_workspace, most_workspace

    shapes = {(m.router.selection, m.width, m.result_width) for m in mixtures}
    sizes = most_workspace(mixture_workspace(*shape, rows, exact) for shape in shapes)
    if any(mixture.shared_gate is not None for mixture in mixtures):
        sizes["shared gate"] = 4 * rows
    return sizes


def _widths(config: Config) -> dict[str, int]:
    """Values a row of every buffer that all layers share."""
    hidden, mixers, recurrents = config.hidden, config.attentions, config.recurrents
    gates = [mixer.gate.linear.rows for mixer in mixers if mixer.gate is not None]
    dense = [d.width for layer in config.layers for d in layer.dense_networks]
    widths = dict.fromkeys((*STREAMS, "normed", "delta", "branch"), hidden)
    if config.stage is not None:
        widths[PASSED] = hidden
    widths |= {saved(name): hidden for name in config.saved_streams}
    if banks := config.banked(config.n_layers):
        widths |= {"banked": banks * hidden, "recalled": hidden}
    mixtures = [mixture for layer in config.layers for mixture in layer.mixtures]
    narrow = max((m.result_width for m in mixtures if m.latent is not None), default=0)
    widths |= dict.fromkeys(("expert input", "expert sum"), narrow)
    widths |= {
        "q": max((mixer.query_width for mixer in mixers), default=0),
        "k": max((mixer.key_width for mixer in mixers), default=0),
        "v": max((mixer.value_width for mixer in mixers), default=0),
        "heads": max([*(m.output_width for m in mixers), *(r.o.cols for r in recurrents)]),
        "attention gate": max(gates, default=0),
    }
    widths |= dict.fromkeys(("gate", "up", "activated"), max(dense, default=0))
    widths |= _recurrent_widths(recurrents) | _latent_widths(mixers)
    widths["normed"] = max(hidden, widths["latent q"])
    if (extra := config.layer_embeddings) is not None:
        widths |= dict.fromkeys(("layer embeddings", "layer projections"), extra.proj.rows)
        widths["layer gate"] = extra.width
    return {name: width for name, width in widths.items() if width}


def _latent_widths(mixers: Sequence[Attention]) -> dict[str, int]:
    """Values a row of what heads of latent vectors are made of."""
    shared = [mixer for mixer in mixers if mixer.latent is not None]
    written = [own for mixer in shared if (own := mixer.written_out) is not None]
    latents = [mixer.latent for mixer in mixers if mixer.latent is not None]
    downs = [of.q_down.rows for of in latents if of.q_down is not None]
    return {
        "latent q": max(downs, default=0),
        "latent": max((of.down.rows for of in latents), default=0),
        "q rotated": max((mixer.q.rows for mixer in shared), default=0),
        "k rotated": max((mixer.k.rows for mixer in shared if mixer.k is not None), default=0),
        "q still": max((of.q_still.rows for of in latents if of.q_still), default=0),
        # keys written out lie there, too
        "q absorbed": max(
            [of.absorb.rows for of in latents if of.absorb] + [own.key_width for own in written],
            default=0,
        ),
        "expanded": max((of.expand.rows for of in latents), default=0),
    }


def _recurrent_widths(mixers: Sequence[Recurrent]) -> dict[str, int]:
    """Values a row of what recurrent mixers make before their result."""
    shorts = [mixer for mixer in mixers if isinstance(mixer, ShortConv)]
    deltas = [mixer for mixer in mixers if isinstance(mixer, KimiDelta)]
    heads = [mixer for mixer in mixers if isinstance(mixer, Recurrence)]
    scans = [mixer for mixer in mixers if isinstance(mixer, Selective)]
    longs: list[Recurrence | Selective] = [*heads, *scans]
    alphas = (
        [m.heads for m in heads] + [m.step.rows for m in scans] + [m.decay.rows for m in deltas]
    )
    steady = [mixer for mixer in mixers if isinstance(mixer, Lightning)]
    gates = [s.output_gate for s in shorts] + [m.gate for m in (*longs, *deltas, *steady)]
    lows = [of.low for of in scans] + [of.decay_low for of in deltas if of.decay_low]
    apart = {
        f"{name} {part}": max((of.parts[part].conv.channels for of in deltas), default=0)
        for name in ("mixed", "convolved")
        for part in "qkv"
    }
    for part in "qkv":
        widths = [apart[f"mixed {part}"], *(of.parts[part].rows for of in steady)]
        apart[f"mixed {part}"] = max(widths)
    return apart | {
        "mixed": max([m.conv.channels for m in longs] + [m.conv.channels for m in shorts] + [0]),
        "convolved": max((mixer.conv.channels for mixer in longs), default=0),
        "input gate": max((mixer.input_gate.rows for mixer in shorts), default=0),
        "recurrent gate": max((gate.rows for gate in gates), default=0),
        "alpha": max(alphas, default=0),
        "beta": max([m.heads for m in heads] + [m.heads for m in deltas] + [0]),
        "low": max((low.rows for low in lows), default=0),
        "gate low": max((of.gate_low.rows for of in deltas if of.gate_low), default=0),
        "scan b": max((mixer.size for mixer in scans), default=0),
        "scan c": max((mixer.size for mixer in scans), default=0),
    }


def _partial_sizes(
    config: Config, cache: CacheShape, rows: int, sm_count: int, runs: set[int]
) -> dict[str, int]:
    """Bytes of the partial results of split attention: the most that a step of up to ``rows`` rows,
    with any of these ``runs`` of a sequence, needs in any length bucket."""
    shapes = {
        (mixer.heads, mixer.scores, cache.layout(index))
        for index, layer in enumerate(config.layers)
        if (mixer := layer.attention) is not None
    }
    return most_partial(
        decode_attention(heads, layout, bucket, sm_count, rows=count, scores=scores, run=run)
        for run in runs
        for heads, scores, layout in shapes
        for bucket in length_buckets(layout.max_len)
        for count in row_buckets(rows)
    )


def most_partial(kernels: Iterable[IncrementalAttention | FlashDecode]) -> dict[str, int]:
    """Bytes of the partial results that any of these kernels leaves."""
    sizes: dict[str, int] = {}
    for kernel in kernels:
        if isinstance(kernel, FlashDecode) and kernel.chunks > 1:
            for param, name in PARTIAL.items():
                sizes[name] = max(sizes.get(name, 0), kernel.nbytes(kernel.param(param)))
    return sizes
