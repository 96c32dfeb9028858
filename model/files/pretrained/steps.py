"""Fields of config.json that are no rename: what a family's table lists as ``steps``."""

from __future__ import annotations

import numpy as np

from urdir.model.files.pretrained.family import Found, Step
from urdir.model.files.pretrained.fields import Fields


def number(found: Found, key: str) -> int:
    """A size that another key follows from; 0 if absent or no integer."""
    value = found.get(key, 0)
    return value if type(value) is int else 0


def layers_of(fields: Fields, found: Found) -> int:
    """The number of layers, checked before a list of that length is made."""
    layers = number(found, "block_count")
    if not 0 < layers < 1 << 16:
        raise fields.wrong("num_hidden_layers", layers)
    return layers


def square_root(name: str) -> Step:
    """Scores are divided by the square root of the field."""

    def step(fields: Fields, found: Found) -> None:
        value = fields.take(name, float)
        if value is not None:
            if value <= 0:
                raise fields.wrong(name, value)
            found["own.score_scale"] = value**-0.5

    return step


def rotates(fields: Fields, found: Found) -> None:
    """Layers without RoPE: ``no_rope_layers`` (1: with RoPE), or every n-th layer."""
    layers = layers_of(fields, found)
    flags = fields.items("no_rope_layers", int)
    every = fields.take("no_rope_layer_interval", int) or 4
    if flags is not None and len(flags) not in (0, layers):
        raise fields.wrong("no_rope_layers", f"{len(flags)} flags for {layers} layers")
    flags = flags or [int((layer + 1) % every != 0) for layer in range(layers)]
    found["own.rotates"] = np.array(flags) != 0


def flag(name: str, key: str) -> Step:
    """A key for a boolean field."""

    def step(fields: Fields, found: Found) -> None:
        value = fields.take(name, bool)
        if value is not None:
            found[key] = value

    return step


def has_windows(fields: Fields, found: Found) -> None:
    """Whether some layers have sliding windows, whatever the number of layers."""
    found["own.has_windows"] = fields.has("sliding_window")


def both_names(*names: str) -> Step:
    """The first of some fields that is given is the one that counts: drop the others."""

    def step(fields: Fields, found: Found) -> None:
        fields.ignore(names)

    return step
