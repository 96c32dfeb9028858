"""Keep a model's streams of the last positions while its draft rests, and take them up again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.speculation.hidden_before import HeldVectors
from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param


@dataclass(frozen=True)
class StreamRing(HeldVectors):
    """ring[s, p % slots] = the vectors x0[r], x1[r], ... of each row r at p = position[r] of
    s = sequence[r], and ``ring_at`` there p. There are ``streams`` of them; each row is of another
    sequence.

    A kernel that ``takes`` has them back, for any rows: x0[r], ... from the ring, zeros where that
    has a later position. ``place[r]`` is p, or IDLE for padding, where p is not before the pending
    token, at known[s] - 1, and where it was never kept: the ring has an earlier position, or none.
    """

    streams: int = 1
    takes: bool = False

    name = "stream_ring"
    limits = limited(**HeldVectors.limits, streams=up_to(16))

    @property
    def params(self) -> tuple[Param, ...]:
        rows, ring = (Access.OUT, Access.IN) if self.takes else (Access.IN, Access.INOUT)
        return Param.given(
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            self.takes and Param("known", "u32", ("sequences",), Access.IN),
            self.takes and Param("place", "u32", ("rows",), Access.OUT),
            *(Param(f"x{i}", "f32", ("rows", "cols"), rows) for i in range(self.streams)),
            Param("ring", "f32", ("sequences", "slots", "streams", "cols"), ring),
            Param("ring_at", "u32", ("sequences", "slots"), ring),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        of = super().launch_shape
        return LaunchShape(grid=(of.grid[0], self.rows, self.streams), block=of.block)

    def bytes_moved(self) -> int:
        """Bytes of the rows, read and written."""
        return self.rows * (16 + 8 * self.cols * self.streams)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        pairs = zip(inputs["sequence"].astype(np.int64), inputs["position"].tolist(), strict=True)
        rows = [(row, (s, p % self.slots), p) for row, (s, p) in enumerate(pairs)]
        if not self.takes:
            ring, ring_at = inputs["ring"].copy(), inputs["ring_at"].copy()
            for row, at, p in rows:
                if p < self.max_len:
                    ring[at] = [inputs[f"x{i}"][row] for i in range(self.streams)]
                    ring_at[at] = p
            return {"ring": ring, "ring_at": ring_at}
        streams = np.zeros((self.streams, self.rows, self.cols), np.float32)
        place = np.full(self.rows, IDLE, np.uint32)
        for row, at, p in rows:
            if p < self.max_len and p + 1 < inputs["known"][at[0]]:
                if p <= inputs["ring_at"][at] < self.max_len:
                    place[row] = p
                if inputs["ring_at"][at] == p:
                    streams[:, row] = inputs["ring"][at]
        return {"place": place, **{f"x{i}": x for i, x in enumerate(streams)}}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rings of which some positions are those of the rows."""
        rows, sizes = self._random_rows(rng), (self.sequences, self.slots)
        if not self.takes:  # a row of a sequence
            _, first = np.unique(rows["sequence"], return_index=True)
            rows["position"][np.setdiff1d(np.arange(self.rows), first)] = IDLE
        rows["ring"] = rng.standard_normal((*sizes, self.streams, self.cols)).astype(np.float32)
        turns = rng.integers(0, 2 + self.max_len // self.slots, sizes)
        rows["ring_at"] = (self.slots * turns + np.arange(self.slots)).astype(np.uint32)
        rows["ring_at"][rng.random(sizes) < 0.2] = IDLE
        for s, p in zip(rows["sequence"], rows["position"], strict=True):
            if p < self.max_len and rng.random() < 0.6:
                rows["ring_at"][s, p % self.slots] = p
        rows["known"] = rng.integers(0, 2 * self.max_len, self.sequences).astype(np.uint32)
        rows |= {f"x{i}": rng.permuted(rows["x"], axis=1) for i in range(self.streams)}
        return {p.name: rows[p.name] for p in self.params if p.access is not Access.OUT}

    @classmethod
    def examples(cls) -> dict[str, StreamRing]:
        runs = cls(cols=132, max_len=40, slots=8, rows=23, sequences=5, streams=3, takes=True)
        return {
            "one row": cls(cols=36, max_len=9, slots=4),
            "three streams": cls(cols=132, max_len=40, slots=8, rows=7, sequences=5, streams=3),
            "odd columns": cls(cols=37, max_len=20, slots=2, rows=3, sequences=4, streams=2),
            "taken": cls(cols=36, max_len=9, slots=4, takes=True),
            "runs, taken": runs,
            "odd, taken": cls(cols=37, max_len=20, slots=2, rows=17, sequences=4, takes=True),
        }
