"""Adapters within a model, which tokens of a text switch on (Granite Switch), described."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.stored import StoredMatrix, StoredVector
from urdir.ptxgen.kernels.linear.epilogue.adapted import RANKS, Element


@dataclass(frozen=True, slots=True)
class SwitchedMatrix:
    """Low-rank matrices of ``rows`` rows from ``first`` on of the tensor ``name``: ``a`` (1 +
    adapters, rank, cols) and ``b`` (1 + adapters, rows, rank), of which the first ones are zeros.
    """

    name: str
    first: int
    rows: int
    a: StoredVector
    b: StoredVector


@dataclass(frozen=True, slots=True)
class Switch:
    """Adapters 1, 2, ... of ``matrices``, which ``tokens`` switch on from their own position on;
    the token is embedded as that of ``substitutes``.

    The adapter of a row is the mean of those that its text has switched on so far, rounded. In this
    mean another token counts as adapter 0 with a weight of exp(-2 ``gain``) (llama.cpp's router: a
    head of attention whose keys are +-gain).
    """

    tokens: tuple[int, ...]
    substitutes: tuple[int, ...]
    gain: float
    rank: int
    matrices: tuple[SwitchedMatrix, ...]

    @property
    def other_weight(self) -> float:
        """The weight of a token that switches nothing on."""
        return math.exp(-2.0 * self.gain)

    def room(self, element: Element) -> AdapterRoom:
        """The room for the adapters."""
        names = frozenset(of.name for of in self.matrices)
        return AdapterRoom(len(self.tokens), -(-self.rank // RANKS) * RANKS, names, element)

    def matrices_of(self, part: StoredMatrix) -> SwitchedMatrix:
        """Those of a matrix that is a part of one tensor's."""
        return next(
            of
            for of in self.matrices
            if of.name == part.name and of.first <= part.first < of.first + of.rows
        )

    def tables(self, vocab: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """The adapter that each token switches on, 0 for none, and the token that it is embedded
        as, (vocab,) u32 each. Of two entries of a token the last one counts."""
        adapters, embedded = np.zeros(vocab, np.uint32), np.arange(vocab, dtype=np.uint32)
        for number, (token, other) in enumerate(
            zip(self.tokens, self.substitutes, strict=True), start=1
        ):
            adapters[token], embedded[token] = number, other
        return adapters, embedded

    def adapters_of(self, tokens: Any, vocab: int) -> npt.NDArray[np.intp]:
        """The adapter of each row of a text, 0 for none."""
        switched = self.tables(vocab)[0][tokens].astype(np.float64)
        weights = np.where(switched > 0, 1.0, self.other_weight)
        mean = np.cumsum(switched) / np.cumsum(weights)
        adapters: npt.NDArray[np.intp] = np.floor(mean + 0.5).astype(np.intp)
        return adapters
