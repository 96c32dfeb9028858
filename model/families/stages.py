"""Pipeline parallelism: runs of whole layers, for models that only have to fit.

Each rank has one run of layers and receives the rows of its predecessor. Rank 0 has the first run,
the embedding and the output: the rows of the last rank return to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.description import Stage
from urdir.model.families.layers import LayerConfig
from urdir.model.families.rwkv import TimeMix


def staged(config: Config, layers: Sequence[int], ends: int, ranks: int) -> list[Config]:
    """The description for each rank, balanced by bytes. ``layers`` are the bytes of each layer,
    ``ends`` those of embedding and output.

    Raises UnsupportedError for state shared by distant layers, and for too few layers.
    """
    _check(config)
    starts = _starts(layers, ends, ranks)
    runs = [config.layers[a:b] for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]
    if len({_kinds(run) for run in runs}) > 1:
        raise UnsupportedError(
            f"{len(layers)} layers of different kinds cannot be cut into {ranks} runs with all "
            "kinds in each: use fewer GPUs, or split by tensors"
        )
    first = replace(config, layers=runs[0], stage=Stage(0, ranks, 0))
    rest = replace(config, positions=None, embedding_norm=None, output_norm=None, adds=None)
    later = zip(range(1, ranks), starts[1:], runs[1:], strict=True)
    return [first, *(replace(rest, layers=run, stage=Stage(r, ranks, at)) for r, at, run in later)]


def _starts(layers: Sequence[int], ends: int, ranks: int) -> list[int]:
    """The first layer of each rank: runs end where the bytes so far are nearest to their share."""
    if len(layers) < ranks:
        raise UnsupportedError(f"{len(layers)} layers cannot be split between {ranks} GPUs")
    until = [0, *accumulate(layers)]
    starts = [0]
    for rank in range(1, ranks):
        ideal = (until[-1] + ends) * rank / ranks - ends
        allowed = range(starts[-1] + 1, len(layers) - (ranks - rank) + 1)
        starts.append(min(allowed, key=lambda at: abs(until[at] - ideal)))
    return starts


def _check(config: Config) -> None:
    """Raise UnsupportedError for features that need all layers on one rank."""
    reason = ""
    if any(mixer.shares_cache_of is not None for mixer in config.attentions):
        reason = "layers that share a cache"
    elif any(mixer.follows_indexer for mixer in config.attentions):
        reason = "layers that attend to what earlier ones selected"
    elif config.has_streams:
        reason = "several residual streams"
    elif config.switch is not None:
        reason = "adapters that tokens switch on"
    elif config.layer_embeddings is not None:
        reason = "embeddings of each layer"
    elif any(isinstance(of, TimeMix) and of.residual for of in config.recurrents):
        reason = "layers that read values of the first one"
    elif config.saved_streams or config.recalls or config.banked(config.n_layers):
        reason = "layers that recall the stream of earlier ones"
    if reason:
        raise UnsupportedError(
            f"a model with {reason} cannot be split by layers: split it by tensors"
        )


def _kinds(layers: Sequence[LayerConfig]) -> frozenset[int | str]:
    """The attention spans and kinds of state of some layers. Rank 0's bookkeeping for all ranks
    depends on them."""
    attention = {layer.attention.span for layer in layers if layer.attention is not None}
    states = {type(mixer).__name__ for layer in layers if (mixer := layer.recurrent) is not None}
    return frozenset(attention | states)
