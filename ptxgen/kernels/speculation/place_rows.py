"""Where the rows of a step stand: at the pending tokens of their sequences, and at drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.kernels.speculation.spec import DraftedRows
from urdir.ptxgen.limits import limited
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class PlaceRows(DraftedRows):
    """The begin of a step: position[r] = known[s] - 1 + place[r], the place of the pending token of
    s = sequence[r], or of a draft after it.

    A row of more drafts than ``found[s]`` of the device and ``given[s]`` of the host, a row without
    work and the rows of a sequence that has ended become idle, their positions IDLE. So the host
    need not know how far a sequence came.

    With ``beside`` rows of a step that has prompts, too, which come first in ``step_sequence`` and
    ``step_position``, these are placed at pending tokens alike; idle ones stay as they are.

    With ``states`` of recurrent layers, ``state_at[s]`` becomes the number of tokens that the state
    of s is after as the step begins, and ``next_state_at[s]`` that as it ends: its pending token is
    the last one. Prompts move states on to the pending token; ``next_state_at`` is above that
    position after them.
    """

    beside: int = 0
    states: bool = False

    name = "place_rows"
    limits = limited(**DraftedRows.limits, beside=range(1025))

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("place", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.INOUT),
            Param("known", "u32", ("sequences",), Access.IN),
            Param("found", "u32", ("sequences",), Access.IN),
            Param("given", "u32", ("sequences",), Access.IN),
            self.beside and Param("step_sequence", "u32", ("beside",), Access.IN),
            self.beside and Param("step_position", "u32", ("beside",), Access.INOUT),
            self.states and Param("state_at", "u32", ("sequences",), Access.INOUT),
            self.states and Param("next_state_at", "u32", ("sequences",), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        threads = 32 * ceil_div(max(self.rows, self.beside), 32)
        return LaunchShape(grid=(1, 1, 1), block=(threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        position, known = inputs["position"].copy(), inputs["known"]
        drafts = np.maximum(inputs["found"], inputs["given"])
        for row, place in enumerate(inputs["place"].tolist()):
            s = inputs["sequence"][row]
            first = IDLE if place == IDLE else inputs["position"][row - place]
            is_idle = first >= self.max_len or place > drafts[s]
            position[row] = IDLE if is_idle else known[s] - 1 + place
        placed = {"position": position}
        going = inputs["sequence"][(inputs["place"] == 0) & (position != IDLE)]
        if self.beside:
            beside = inputs["step_position"].copy()
            active = beside < self.max_len
            going = inputs["step_sequence"][active]
            beside[active] = known[going] - 1
            placed["step_position"] = beside
        if self.states:
            state_at, following = inputs["state_at"].copy(), inputs["next_state_at"].copy()
            state_at[going] = np.minimum(following[going], known[going] - 1)
            following[going] = known[going]
            placed |= {"state_at": state_at, "next_state_at": following}
        return placed

    @classmethod
    def examples(cls) -> dict[str, PlaceRows]:
        return {
            "one row": cls(max_len=9),
            "rows of some sequences": cls(max_len=50, rows=13, sequences=5),
            "many rows": cls(max_len=99, rows=96, sequences=40),
            "beside prompts": cls(max_len=30, rows=5, sequences=9, beside=48),
            "states": cls(max_len=50, rows=13, sequences=5, states=True),
            "states beside prompts": cls(max_len=30, rows=5, sequences=48, beside=40, states=True),
        }

    def bytes_moved(self) -> int:
        """Rows, and what they read of their sequences."""
        return (24 + 12 * self.states) * self.rows + (16 + 12 * self.states) * self.beside

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at positions that are not known; fewer drafts than rows of them."""
        rows = self._random_rows(rng, min(MOST_DRAFTS, 7))
        most, known = rows.pop("wanted"), rows["known"]
        found = np.zeros(self.sequences, np.uint32)
        found[rows["sequence"]] = rng.integers(0, most, endpoint=True)
        found[rng.random(self.sequences) < 0.5] = MOST_DRAFTS
        rows["found"] = found
        rows["given"] = np.where(rng.random(self.sequences) < 0.3, found[::-1], 0).astype(np.uint32)
        stale = rng.integers(0, self.max_len, self.rows)
        rows["position"] = np.where(rows["position"] == IDLE, IDLE, stale).astype(np.uint32)
        if self.states:  # rows beside prompts are of different sequences then
            rows["state_at"] = rng.integers(0, self.max_len, self.sequences).astype(np.uint32)
            before = known.astype(np.int64) - rng.integers(0, 5, self.sequences)
            unknown = rng.random(self.sequences) < 0.3
            rows["next_state_at"] = np.where(unknown, IDLE, before.clip(0)).astype(np.uint32)
            step_sequence = rng.permutation(self.sequences)[: self.beside]
        else:
            step_sequence = rng.integers(0, self.sequences, self.beside)
        rows["step_sequence"] = step_sequence.astype(np.uint32)
        stale = known[rows["step_sequence"]] - 1
        stale[rng.random(self.beside) < 0.3] = IDLE
        rows["step_position"] = stale
        return {p.name: rows[p.name] for p in self.params}
