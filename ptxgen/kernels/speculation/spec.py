"""What the kernels of speculation have in common: rows of pending tokens and of their drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.limits import POSITIVE, POSITIVE_31_BITS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param


@dataclass(frozen=True)
class DraftedRows(KernelSpec):
    """A kernel for ``rows`` of ``sequences`` of up to ``max_len`` tokens, of which ``known[s]`` are
    valid: the last one is pending.

    Row r is of sequence ``sequence[r]``. ``place[r]`` is 0 for the row of the pending token, i for
    that of draft i, which follows it i rows later, and `IDLE` for a row without work. Where the row
    of the pending token has a position of ``max_len`` or more, the sequence has ended.

    Raises PtxgenError for sizes that are out of range.
    """

    max_len: int
    rows: int = 1
    sequences: int = 1

    limits = limited(max_len=POSITIVE_31_BITS, rows=up_to(1024), sequences=POSITIVE)

    @property
    def wanting_params(self) -> tuple[Param, ...]:
        """Rows, the drafts that each one's sequence wants, and the tokens that are valid: what a
        kernel that makes drafts reads."""
        rows = ("sequence", "place", "position", "wanted")
        return (
            *(Param(name, "u32", ("rows",), Access.IN) for name in rows),
            Param("known", "u32", ("sequences",), Access.IN),
        )

    def _random_rows(self, rng: np.random.Generator, most: int) -> dict[str, Array]:
        """Rows of different sequences with up to ``most`` drafts each, padding after them; some
        sequences have ended. ``wanted`` are the drafts of each row's sequence."""
        sequence = np.zeros(self.rows, np.uint32)
        place = np.full(self.rows, IDLE, np.uint32)
        position = np.full(self.rows, IDLE, np.uint32)
        wanted = np.zeros(self.rows, np.uint32)
        known = rng.integers(1, self.max_len, self.sequences, endpoint=True).astype(np.uint32)
        row = 0
        for s in rng.permutation(self.sequences):
            room = min(most, self.rows - row - 1, self.max_len - int(known[s]))
            if room < 0:
                continue
            drafts = int(rng.integers(0, room, endpoint=True))
            rows = slice(row, row + 1 + drafts)
            sequence[rows], place[rows], wanted[rows] = s, np.arange(1 + drafts), drafts
            position[row] = known[s] - 1 if rng.random() < 0.8 else IDLE
            row += 1 + drafts
        return {
            "sequence": sequence,
            "place": place,
            "position": position,
            "wanted": wanted,
            "known": known,
        }
