"""Common parts of kernels with a state per sequence: which rows advance which state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.random_rows import random_rows
from urdir.ptxgen.spec import Access, KernelSpec, Param, ceil_div

#: Segments start at multiples of this many rows.
SEGMENT_ROWS = 8
#: Maximum bytes of states read while the previous launch still works: 40 KB per SM of a big GPU, as
#: for the weights of products (`PACE_NBYTES`); its own loads queue behind these. On an H200 steps
#: of 4 and 8 sequences of Falcon-H1-7B, whose states of a layer have 12.6 and 25 MB, took 2.476 and
#: 3.143 ms when all were read early, 2.432 and 3.121 ms with this limit.
EARLY_NBYTES = 132 * 40 * 1024


@dataclass(frozen=True)
class RecurrentRows(KernelSpec):
    """Rows that advance the states of ``sequences``: row r is token ``position[r]`` of sequence
    ``sequence[r]``.

    Without ``segments`` each row is a token of a different sequence. Otherwise there are up to
    ``segments`` segments, consecutive tokens of a sequence each, from row ``segment[i, 0]`` up to
    ``segment[i, 1]``: in order, the first at row 0, each at a multiple of `SEGMENT_ROWS`, each of a
    different sequence. Unused entries are (rows, rows). Rows between the end of a segment and the
    next start are padding rows.

    A token at position 0 starts with a state of zeros, whatever is stored. A position from
    ``max_len`` on marks a padding row: it advances nothing, and its result is zeros. A sequence's
    results do not depend on other sequences nor, except in `ChunkedRecurrence`, on how its tokens
    are divided into segments: bit for bit.
    """

    rows: int
    sequences: int
    max_len: int
    segments: int

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535 or self.sequences < 1 or self.max_len < 1:
            raise PtxgenError(
                f"{self.name}: {self.rows} rows (1 to 65535) of {self.sequences} sequences of up "
                f"to {self.max_len} tokens"
            )
        if not 0 <= self.segments <= ceil_div(self.rows, SEGMENT_ROWS):
            raise PtxgenError(
                f"{self.name}: {self.segments} segments in {self.rows} rows: each begins at a "
                f"multiple of {SEGMENT_ROWS}"
            )

    @property
    def reads_early(self) -> bool:
        """Whether the states are read before ``griddepcontrol.wait``: those of few single rows. See
        `EARLY_NBYTES`."""
        states = sum(self.nbytes(p) for p in self.params if p.access is Access.INOUT)
        return not self.segments and self.rows * states <= self.sequences * EARLY_NBYTES

    @property
    def row_params(self) -> tuple[Param, ...]:
        """Parameters with the sequences and positions of the rows."""
        segments = (Param("segment", "u32", ("segments", 2), Access.IN),) if self.segments else ()
        return (
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            *segments,
        )

    def tokens(self, inputs: Mapping[str, Any]) -> Iterator[tuple[int, int, bool]]:
        """Row, sequence and whether the state starts from zeros, for every active row."""
        bounds = inputs["segment"].tolist() if self.segments else [(0, self.rows)]
        for row in (row for start, end in bounds for row in range(start, end)):
            position = int(inputs["position"][row])
            if position < self.max_len:
                yield row, int(inputs["sequence"][row]), position == 0

    def make_rows(self, rng: np.random.Generator) -> dict[str, Any]:
        """Inputs of `row_params`: several rows include padding rows and first tokens."""
        return random_rows(self, SEGMENT_ROWS, rng)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """See `make_rows`."""
        return super().make_inputs(rng) | self.make_rows(rng)
