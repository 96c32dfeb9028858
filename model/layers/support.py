"""Which models have operations: the one place that knows of those that have not."""

from __future__ import annotations

from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Network
from urdir.model.families.stored import Linear
from urdir.ptxgen.kernels.activation import Activation


def has_operations(config: Config) -> bool:
    """Whether all networks of a model have operations; `blocks` appends launches of the others."""
    return all(_has(network) for layer in config.layers for network in layer.networks)


def _has(network: Network) -> bool:
    if isinstance(network, Attention):
        return network.latent is None
    return isinstance(network, Dense | Linear | Activation)
