"""Random rows of kernels with a state per sequence: single ones, segments of prompts, drafts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.spec import ceil_div


class StateRows(Protocol):
    """See `rows.RecurrentRows`."""

    @property
    def rows(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def segments(self) -> int: ...


def random_rows(spec: StateRows, step: int, rng: np.random.Generator) -> dict[str, Any]:
    """Segments that begin at multiples of ``step``, or single rows without ``segments``."""
    return _segments(spec, step, rng) if spec.segments else _single_rows(spec, rng)


def _single_rows(spec: StateRows, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of different sequences; padding rows and first tokens among several."""
    sequence = rng.permutation(max(spec.sequences, spec.rows))[: spec.rows]
    position = rng.integers(0, spec.max_len, spec.rows)
    position[1::3], position[2::4] = 0, IDLE
    # rows beyond the sequences are padding rows, and name an existing sequence
    position[sequence >= spec.sequences] = IDLE
    sequence = np.minimum(sequence, spec.sequences - 1)
    return {"sequence": sequence.astype(np.uint32), "position": position.astype(np.uint32)}


def _segments(spec: StateRows, step: int, rng: np.random.Generator) -> dict[str, Any]:
    """The maximum number of segments, or one fewer, at random multiples of ``step``; of one row or
    more."""
    places = ceil_div(spec.rows, step)
    most = min(spec.segments, spec.sequences)
    count = max(1, most - int(rng.integers(0, 2)))
    begins = np.sort(rng.permutation(np.arange(1, places))[: count - 1])
    starts = [0, *(step * begins).tolist()]
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


def rows_of_drafts(spec: StateRows, rng: np.random.Generator, most: int) -> dict[str, Any]:
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
