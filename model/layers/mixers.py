"""Mixers with a state, each by the function for its record."""

from __future__ import annotations

from importlib import import_module

from urdir.model import layers
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.stored import Normalization
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import LayerOps


def state_mixer(
    at: LayerOps, mixer: Recurrent, x: Tensor, norm: Normalization | None, scale: float
) -> Tensor:
    """scale * a mixer of the norm of x: records of `families/x.py` have functions in
    `layers/x.py`, listed in its ``MIXERS``."""
    kind = type(mixer)
    module = import_module(f"{layers.__name__}.{kind.__module__.rpartition('.')[2]}")
    made: Tensor = module.MIXERS[kind](at, mixer, x, norm, scale)
    return made
