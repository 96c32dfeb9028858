"""Mixers with a state by their records: those of `families/x.py` are in `x.py` beside this file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from urdir.model.families.recurrent import Recurrent

if TYPE_CHECKING:
    from tests.model.reference import Reference
    from urdir.model.families.layers import Branch

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Example(NamedTuple):
    """A mixer that no family has, made of the weights of a file of `tests/data/families`:
    ``change`` is given each branch (`families.layers.Branch`) with a mixer."""

    file: str
    change: Callable[[Branch], Recurrent]


def mixer(model: Reference, of: Recurrent, x: Floats) -> Floats:
    """The results (tokens, hidden) of a mixer, of the normed stream x of all tokens."""
    stem = type(of).__module__.rpartition(".")[2]
    y: Floats = import_module(f"tests.model.mixers.{stem}").MIXERS[type(of)](model, of, x)
    return y


def sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)
