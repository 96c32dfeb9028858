"""States where steps verify drafts: which rows are certain, and what is kept of the others.

A step processes the pending token of a sequence and some drafts after it. Whether these stand is
known when the step is over. So the state is stored after the pending token, and inputs of the
drafts are kept: where a draft was accepted, the next step moves the state on by them first. A state
is read and written once a step, as without drafts, and what is kept of a row is a small part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.spec import Access, Array, Param

#: What names of kept inputs begin with.
KEPT = "drafted_"


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


def kept_slots(most: int) -> int:
    """Slots for inputs of drafts, by position: those of accepted drafts are read while those of new
    ones are written, up to ``most`` of each. A power of two."""
    return 1 << (2 * most).bit_length()


class DraftedStates(RecurrentRows):
    """Rows in steps of up to ``most`` drafts of a sequence.

    States are those after ``state_at[s]`` tokens of sequence s. The inputs of tokens from there on
    are at slot position % ``slots`` of the ``drafted_`` arrays. Each launch first moves a state on
    by them up to the position of the sequence's first row, then by that row, and stores it. Where
    rows are ``drafted``, others of the sequence follow, at consecutive positions, up to ``most``:
    they read the state, and their inputs are kept.
    """

    most: int
    drafted: bool

    def check_rows(self) -> None:
        """Raise PtxgenError for rows of prompts, and for numbers of drafts out of range."""
        if self.segments:
            raise PtxgenError(f"{self.name}: segments are rows of prompts, which verify no drafts")
        if not 1 <= self.most <= MOST_DRAFTS:
            raise PtxgenError(f"{self.name}: at most {self.most} drafts: 1 to {MOST_DRAFTS}")

    @property
    def slots(self) -> int:
        """See `kept_slots`."""
        return kept_slots(self.most)

    @property
    def kept_inputs(self) -> tuple[Param, ...]:
        """The inputs, by rows, that are kept of drafts."""
        raise NotImplementedError

    @property
    def kept_params(self) -> tuple[Param, ...]:
        """How far states are, and the kept inputs."""
        access = Access.INOUT if self.drafted else Access.IN
        kept = (
            Param(KEPT + p.name, p.dtype, ("sequences", "slots", *p.shape[1:]), access)
            for p in self.kept_inputs
        )
        return (Param("state_at", "u32", ("sequences",), Access.IN), *kept)

    def sequences_of(self, inputs: Mapping[str, Any]) -> Iterator[SequenceRows]:
        """The rows of every sequence with work."""
        sequence, position = inputs["sequence"].tolist(), inputs["position"].tolist()
        row = 0
        while row < self.rows:
            first, s, at = row, sequence[row], position[row]
            row += 1
            if at >= self.max_len:
                continue
            while (
                self.drafted
                and row < self.rows
                and (sequence[row], position[row]) == (s, at + row - first)
            ):
                row += 1
            yield SequenceRows(s, first, at, row - first, int(inputs["state_at"][s]))

    def keep(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """The kept inputs after a launch, where that changes them."""
        if not self.drafted:
            return {}
        kept = {p.name: inputs[KEPT + p.name].copy() for p in self.kept_inputs}
        for of in self.sequences_of(inputs):
            for i in range(1, of.count):
                for name, array in kept.items():
                    slot = (of.position + i) % self.slots
                    array[of.sequence, slot] = inputs[name][of.first + i]
        return {KEPT + name: array for name, array in kept.items()}

    def tokens_of(self, inputs: Mapping[str, Any], of: SequenceRows) -> dict[str, Array]:
        """Inputs of a sequence's tokens from where its state is: those kept, then its rows."""
        slots = np.arange(of.stored, of.position) % self.slots
        rows = slice(of.first, of.first + of.count)
        return {
            p.name: np.concatenate(
                [inputs[KEPT + p.name][of.sequence, slots], inputs[p.name][rows]]
            )
            for p in self.kept_inputs
        }

    def make_rows(self, rng: np.random.Generator) -> dict[str, Any]:
        """See `random_rows`."""
        return random_rows(self, rng, self.most if self.drafted else 0)


def random_rows(spec: RecurrentRows, rng: np.random.Generator, most: int) -> dict[str, Any]:
    """Rows of sequences with up to ``most`` drafts, and some accepted ones before them; padding
    rows between and after them."""
    sequence = rng.integers(0, spec.sequences, spec.rows).astype(np.uint32)
    position = np.full(spec.rows, IDLE, np.uint32)
    state_at = np.zeros(spec.sequences, np.uint32)
    row = 0
    for s in rng.permutation(spec.sequences):
        count = 1 + int(rng.integers(0, most, endpoint=True))
        count = min(count, spec.rows - row, spec.max_len)
        if count < 1:
            break
        first = int(rng.integers(0, spec.max_len - count, endpoint=True))
        first = 0 if rng.random() < 0.2 else first
        state_at[s] = max(0, first - int(rng.integers(0, most, endpoint=True)))
        sequence[row : row + count] = s
        position[row : row + count] = first + np.arange(count)
        row += count + int(rng.random() < 0.3)
    return {"sequence": sequence, "position": position, "state_at": state_at}
