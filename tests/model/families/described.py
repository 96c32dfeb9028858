"""What tests of mixtures ask of a description."""

from __future__ import annotations

from typing import Any

from urdir.model.families.config import Config
from urdir.model.families.layers import Network


def read(model: Any) -> Config:
    return Config.of(model)


def second(config: Config, layer: int) -> Network:
    """The network after (or beside) a layer's attention."""
    return config.layers[layer].networks[-1]


def kinds(config: Config) -> list[type]:
    return [type(second(config, layer)) for layer in range(config.n_layers)]
