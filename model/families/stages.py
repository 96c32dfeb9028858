"""The layers of a model that one of several ranks has, for models that only have to fit.

Each rank has a run of layers, whole, and its predecessor's rows come to it. Rank 0 has the first
run, the embedding before it, and the output: the last rank's rows come back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.description import Stage
from urdir.model.families.layers import LayerConfig


def staged(config: Config, layers: Sequence[int], ends: int, ranks: int) -> list[Config]:
    """The description for each rank. ``layers`` are the bytes of each layer, ``ends`` those of
    embedding and output: ranks get about as many bytes each.

    Raises UnsupportedError for what layers far apart have in common, and where there are too few.
    """
    _check(config)
    starts = _starts(layers, ends, ranks)
    runs = [config.layers[a:b] for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]
    if len({_kinds(run) for run in runs}) > 1:
        raise UnsupportedError(
            f"{len(layers)} layers of different kinds cannot be cut into {ranks} runs that have "
            "all of them: give fewer GPUs, or share each layer (split by tensors)"
        )
    first = replace(config, layers=runs[0], stage=Stage(0, ranks, 0))
    rest = replace(config, positions=None, embedding_norm=None, output_norm=None, adds=None)
    later = zip(range(1, ranks), starts[1:], runs[1:], strict=True)
    return [first, *(replace(rest, layers=run, stage=Stage(r, ranks, at)) for r, at, run in later)]


def _starts(layers: Sequence[int], ends: int, ranks: int) -> list[int]:
    """The first layer of each rank: each ends where the bytes so far are nearest to its part."""
    if len(layers) < ranks:
        raise UnsupportedError(f"{len(layers)} layers are no work for {ranks} GPUs")
    until = [0, *accumulate(layers)]
    starts = [0]
    for rank in range(1, ranks):
        ideal = (until[-1] + ends) * rank / ranks - ends
        allowed = range(starts[-1] + 1, len(layers) - (ranks - rank) + 1)
        starts.append(min(allowed, key=lambda at: abs(until[at] - ideal)))
    return starts


def _check(config: Config) -> None:
    """Raise UnsupportedError for what a rank alone does not know."""
    reason = ""
    if any(mixer.shares_cache_of is not None for mixer in config.attentions):
        reason = "layers that share a cache"
    elif config.layer_embeddings is not None:
        reason = "embeddings of each layer"
    elif config.saved_streams or config.recalls or config.banked(config.n_layers):
        reason = "layers that recall the stream of earlier ones"
    if reason:
        raise UnsupportedError(f"a model with {reason} is not split by layers: split it by tensors")


def _kinds(layers: Sequence[LayerConfig]) -> frozenset[int | str]:
    """How far the layers look back, and what keeps their states: the bookkeeping, which rank 0 does
    for all, depends on that."""
    attention = {layer.attention.span for layer in layers if layer.attention is not None}
    states = {type(mixer).__name__ for layer in layers if (mixer := layer.recurrent) is not None}
    return frozenset(attention | states)
