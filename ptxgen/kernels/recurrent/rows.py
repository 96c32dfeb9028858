"""What kernels with a state per sequence have in common: which rows advance which state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, KernelSpec, Param


@dataclass(frozen=True)
class RecurrentRows(KernelSpec):
    """Rows that advance the states of ``sequences``: row r is token ``position[r]`` of sequence
    ``sequence[r]``.

    Each row is a token of another sequence; or the rows are ``consecutive`` tokens of one, of which
    ``last_row`` is the last that is not idle. A token at position 0 begins with a state of zeros,
    whatever is stored. A position from ``max_len`` on is an idle row: it advances nothing, and its
    result is zeros.
    """

    rows: int
    sequences: int
    max_len: int
    consecutive: bool

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535 or self.sequences < 1 or self.max_len < 1:
            raise PtxgenError(
                f"{self.name}: {self.rows} rows (1 to 65535) of {self.sequences} sequences of up "
                f"to {self.max_len} tokens"
            )

    @property
    def row_params(self) -> tuple[Param, ...]:
        """What says whose tokens the rows are."""
        last = (Param("last_row", "u32", (1,), Access.IN),) if self.consecutive else ()
        return (
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            *last,
        )

    def tokens(self, inputs: Mapping[str, Any]) -> Iterator[tuple[int, int, bool]]:
        """Row, sequence and whether the state begins anew, of every row that is not idle."""
        count = int(inputs["last_row"][0]) + 1 if self.consecutive else self.rows
        for row in range(count):
            position = int(inputs["position"][row])
            if position < self.max_len:
                yield row, int(inputs["sequence"][row]), position == 0

    def make_rows(self, rng: np.random.Generator) -> dict[str, Any]:
        """Inputs of `row_params`: of several rows some are idle, and some are first tokens."""
        if not self.consecutive:
            sequence = rng.permutation(max(self.sequences, self.rows))[: self.rows]
            position = rng.integers(0, self.max_len, self.rows)
            position[1::3], position[2::4] = 0, 0xFFFFFFFF
            # rows beyond the sequences are idle, and name one that exists
            position[sequence >= self.sequences] = 0xFFFFFFFF
            sequence = np.minimum(sequence, self.sequences - 1)
            return {
                "sequence": sequence.astype(np.uint32),
                "position": position.astype(np.uint32),
            }
        count = max(1, self.rows - int(rng.integers(0, 3)))
        position = np.full(self.rows, 0xFFFFFFFF, np.uint32)
        position[:count] = np.arange(count) + (0 if self.rows % 2 else 3)
        return {
            "sequence": np.full(self.rows, rng.integers(0, self.sequences), np.uint32),
            "position": position,
            "last_row": np.array([count - 1], np.uint32),
        }
