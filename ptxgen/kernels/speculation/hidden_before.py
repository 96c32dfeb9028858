"""The hidden state of the position before each row's, for drafts that read the model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.row_threads import VectorThreads
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, POWERS_OF_TWO, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param


@dataclass(frozen=True)
class HeldVectors(VectorThreads, KernelSpec):
    """A kernel for ``rows`` vectors of ``cols`` values, each of a position of a sequence, of which
    the last ones are kept: ``held[s, p % slots]`` is that of position p. A position of ``max_len``
    or more marks a padding row. ``slots`` is a power of two.

    Raises PtxgenError for sizes that are out of range.
    """

    cols: int
    max_len: int
    slots: int
    rows: int = 1
    sequences: int = 1

    limits = limited(
        cols=POSITIVE,
        sequences=POSITIVE,
        rows=GRID_ROWS,
        max_len=POSITIVE_31_BITS,
        slots=POWERS_OF_TWO,
    )

    def bytes_moved(self) -> int:
        """Bytes of the rows, read and written."""
        return self.rows * (16 + 8 * self.cols)

    def _random_rows(self, rng: np.random.Generator) -> dict[str, Array]:
        """Runs of positions of different sequences, and padding among them."""
        sequence = np.zeros(self.rows, np.uint32)
        position = np.full(self.rows, IDLE, np.uint32)
        row = 0
        for s in rng.permutation(self.sequences):
            if row >= self.rows:
                break
            count = int(rng.integers(1, min(self.rows - row, self.max_len), endpoint=True))
            start = int(rng.integers(0, self.max_len - count, endpoint=True))
            sequence[row : row + count] = s
            position[row : row + count] = np.arange(start, start + count)
            row += count + int(rng.integers(0, 2))
        return {
            "sequence": sequence,
            "position": position,
            "x": rng.standard_normal((self.rows, self.cols)).astype(np.float32),
            "held": rng.standard_normal((self.sequences, self.slots, self.cols)).astype(np.float32),
        }


@dataclass(frozen=True)
class HiddenBefore(HeldVectors):
    """y[r] = the vector of position[r] - 1 of sequence[r]: x[r - 1] where that row is the one
    before, else ``held``, where the position is not before ``begun[s]``, else zeros.

    ``place[r]`` is where a draft keeps the row: position[r] - lag. With a ``lag`` a row whose
    vector is not known has no place (IDLE), as a padding row. With ``alone`` every row is of
    another sequence, and there is no x.
    """

    lag: int = 0
    alone: bool = False

    name = "hidden_before"
    limits = limited(**HeldVectors.limits, lag=(0, 1))

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            not self.alone and Param("x", "f32", ("rows", "cols"), Access.IN),
            Param("held", "f32", ("sequences", "slots", "cols"), Access.IN),
            Param("begun", "u32", ("sequences",), Access.IN),
            Param("place", "u32", ("rows",), Access.OUT),
            Param("y", "f32", ("rows", "cols"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = np.zeros((self.rows, self.cols), np.float32)
        place = np.full(self.rows, IDLE, np.uint32)
        sequence, position = inputs["sequence"].astype(np.int64), inputs["position"].tolist()
        for row, (s, p) in enumerate(zip(sequence, position, strict=True)):
            if p >= self.max_len:
                continue
            follows = not self.alone and row > 0
            follows = follows and sequence[row - 1] == s and position[row - 1] + 1 == p
            is_held = p > int(inputs["begun"][s])
            if follows:
                y[row] = inputs["x"][row - 1]
            elif is_held:
                y[row] = inputs["held"][s, (p - 1) % self.slots]
            if not self.lag or (p > 0 and (follows or is_held)):
                place[row] = p - self.lag
        return {"place": place, "y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Sequences whose vectors before are known or not."""
        rows = self._random_rows(rng)
        rows["begun"] = rng.integers(0, self.max_len, self.sequences).astype(np.uint32)
        rows["begun"][rng.random(self.sequences) < 0.5] = 0
        return {p.name: rows[p.name] for p in self.params if p.access is Access.IN}

    @classmethod
    def examples(cls) -> dict[str, HiddenBefore]:
        return {
            "one row": cls(cols=36, max_len=9, slots=4),
            "runs": cls(cols=132, max_len=40, slots=8, rows=23, sequences=5),
            "odd columns, a lag": cls(cols=37, max_len=20, slots=2, rows=17, sequences=4, lag=1),
            "alone": cls(cols=516, max_len=30, slots=4, rows=6, sequences=9, lag=1, alone=True),
        }
