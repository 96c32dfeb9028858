"""Rows that verify drafts in numpy: the tokens of each sequence, and what is kept of its drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.drafted_rows import KEPT, DraftedStates
from urdir.ptxgen.spec import Array


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of a sequence in a step: from row ``first``, at ``position``, ``count`` of them;
    before it ``replayed`` accepted drafts, from position ``stored`` on."""

    sequence: int
    first: int
    position: int
    count: int
    stored: int

    @property
    def replayed(self) -> int:
        """Drafts that were accepted after the state was stored."""
        return self.position - self.stored


def sequences_of(spec: DraftedStates, inputs: Mapping[str, Any]) -> Iterator[SequenceRows]:
    """The rows of every sequence with work."""
    sequence, position = inputs["sequence"].tolist(), inputs["position"].tolist()
    row = 0
    while row < spec.rows:
        first, s, at = row, sequence[row], position[row]
        row += 1
        if at >= spec.max_len:
            continue
        while (
            spec.drafted
            and row < spec.rows
            and (sequence[row], position[row]) == (s, at + row - first)
        ):
            row += 1
        yield SequenceRows(s, first, at, row - first, int(inputs["state_at"][s]))


def tokens_of(spec: DraftedStates, inputs: Mapping[str, Any], of: SequenceRows) -> dict[str, Array]:
    """Inputs of a sequence's tokens from where its state is: those kept, then its rows."""
    slots = np.arange(of.stored, of.position) % spec.slots
    rows = slice(of.first, of.first + of.count)
    return {
        p.name: np.concatenate([inputs[KEPT + p.name][of.sequence, slots], inputs[p.name][rows]])
        for p in spec.kept_inputs
    }


def keep(spec: DraftedStates, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """The kept inputs after a launch, where that changes them."""
    if not spec.drafted:
        return {}
    kept = {p.name: inputs[KEPT + p.name].copy() for p in spec.kept_inputs}
    for of in sequences_of(spec, inputs):
        for i in range(1, of.count):
            for name, array in kept.items():
                slot = (of.position + i) % spec.slots
                array[of.sequence, slot] = inputs[name][of.first + i]
    return {KEPT + name: array for name, array in kept.items()}
