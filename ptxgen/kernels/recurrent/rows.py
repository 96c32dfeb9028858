"""Common parts of kernels with a state per sequence: which rows advance which state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, limited
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

    limits = limited(rows=GRID_ROWS, sequences=POSITIVE, max_len=POSITIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return _segments(self, rng) if self.segments else _single_rows(self, rng)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return super().make_inputs(rng) | self.make_rows(rng)


def _single_rows(spec: RecurrentRows, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of different sequences; padding rows and first tokens among several."""
    sequence = rng.permutation(max(spec.sequences, spec.rows))[: spec.rows]
    position = rng.integers(0, spec.max_len, spec.rows)
    position[1::3], position[2::4] = 0, IDLE
    # rows beyond the sequences are padding rows, and name an existing sequence
    position[sequence >= spec.sequences] = IDLE
    sequence = np.minimum(sequence, spec.sequences - 1)
    return {"sequence": sequence.astype(np.uint32), "position": position.astype(np.uint32)}


def _segments(spec: RecurrentRows, rng: np.random.Generator) -> dict[str, Any]:
    """The maximum number of segments, or one fewer, at random multiples of `SEGMENT_ROWS`; of
    one row or more."""
    places = ceil_div(spec.rows, SEGMENT_ROWS)
    most = min(spec.segments, spec.sequences)
    count = max(1, most - int(rng.integers(0, 2)))
    begins = np.sort(rng.permutation(np.arange(1, places))[: count - 1])
    starts = [0, *(SEGMENT_ROWS * begins).tolist()]
    bounds = np.full((spec.segments, 2), spec.rows, np.uint32)
    sequence = np.full(spec.rows, spec.sequences - 1, np.uint32)
    position = np.full(spec.rows, IDLE, np.uint32)
    owners = rng.permutation(spec.sequences)
    for i, (start, behind) in enumerate(zip(starts, [*starts[1:], spec.rows], strict=True)):
        end = max(start + 1, behind - int(rng.integers(0, 3)))
        end = min(end, start + spec.max_len)
        first = int(rng.integers(0, 2) * rng.integers(0, spec.max_len - (end - start) + 1))
        bounds[i] = start, end
        sequence[start:end] = owners[i]
        position[start:end] = first + np.arange(end - start)
    return {"sequence": sequence, "position": position, "segment": bounds}


def rows_of_drafts(spec: RecurrentRows, rng: np.random.Generator, most: int) -> dict[str, Any]:
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
