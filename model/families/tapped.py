"""Models whose streams are kept for a draft, and heads as a model of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from urdir.model.errors import UnsupportedError
from urdir.model.families.description import Description

_D = TypeVar("_D", bound=Description)


def tap(layer: int) -> str:
    """The name under which the stream before a layer is kept (`LayerConfig.saves`); of the number
    of layers that after the last one, before the output's norm."""
    return f"stream {layer}"


def tapped(model: _D, layers: Iterable[int]) -> _D:
    """The same model that keeps the streams before some ``layers``, in every row of a step.

    Raises UnsupportedError for a layer that it does not have, or whose stream has another use.
    """
    for layer in dict.fromkeys(layers):
        if not 0 <= layer <= model.n_layers:
            raise UnsupportedError(f"the stream before layer {layer} of {model.n_layers} layers")
        model = _kept(model, layer)
    return model


def _kept(model: _D, layer: int) -> _D:
    before = model if layer == 0 else model.layers[layer - 1]
    if before.saves is not None or before.adds is not None or model.stage is not None:
        raise UnsupportedError(
            f"the stream before layer {layer} of {model.architecture}: it is kept or added to "
            "already, or on another device"
        )
    if layer == 0:
        return replace(model, saves=tap(0))
    layers = list(model.layers)
    layers[layer - 1] = replace(layers[layer - 1], saves=tap(layer))
    return replace(model, layers=tuple(layers))


def nextn_heads(model: _D) -> _D:
    """The heads of a model for predicting several tokens: a model of a layer for each head, which
    has neither an embedding's norm nor kept streams. Its weights are the model's."""
    assert model.nextn
    return replace(
        model,
        layers=tuple(head.layer for head in model.nextn),
        output_norm=None,
        positions=None,
        embedding_norm=None,
        saves=None,
        adds=None,
        layer_embeddings=None,
        recalls=None,
        nextn=(),
    )
