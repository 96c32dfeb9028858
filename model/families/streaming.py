"""Tensors in host memory, part of a model's description."""

from __future__ import annotations

from dataclasses import dataclass

#: More layers than a model has.
ALL_LAYERS = 1 << 20
#: Slots that the matrices of layers take turns in: one is read while the next is filled.
SLOTS = 2


@dataclass(frozen=True, slots=True)
class Streaming:
    """Tensors of layers by ``names`` whose matrices lie in host memory, and take turns in ``slots``
    of device memory, each for one layer's. Of mixtures whose experts are all there, every layer has
    ``experts`` of them in device memory, those that were used last. Tensors ``in_files`` are read
    from files in place of host memory."""

    names: frozenset[str]
    slots: int = SLOTS
    experts: int = 0
    in_files: frozenset[str] = frozenset()
