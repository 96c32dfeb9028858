"""States where steps verify drafts: which rows are certain, and what is kept of the others.

A step processes the pending token of a sequence and some drafts after it. Whether these stand is
known when the step is over. So the state is stored after the pending token, and inputs of the
drafts are kept: where a draft was accepted, the next step moves the state on by them first. A state
is read and written once a step, as without drafts, and what is kept of a row is a small part of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows, rows_of_drafts
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.spec import Access, Param

#: What names of kept inputs begin with.
KEPT = "drafted_"


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

    def make_rows(self, rng: np.random.Generator) -> dict[str, Any]:
        return rows_of_drafts(self, rng, self.most if self.drafted else 0)

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, once, the rows, and what is kept of them."""
        kept = sum(self.nbytes(p) for p in self.kept_inputs)
        return super().bytes_moved() + (kept if self.drafted else 0)
