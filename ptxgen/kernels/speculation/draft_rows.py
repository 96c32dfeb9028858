"""The rows that a draft model begins with: a pending token of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.kernels.speculation.spec import DraftedRows
from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class DraftRows(DraftedRows):
    """The begin of a step with a draft model: the i-th row of a pending token (``place`` 0) becomes
    row i of ``answers``, without the rows of drafts between them.

    Of a sequence s that goes on and wants w > 0 drafts, at n = known[s] - 1: ``token_position`` is
    n, ``draft_position`` n - lag, ``until`` the place n + w of the last draft, as far as
    ``max_len`` allows. Other rows are padding: both positions IDLE. ``found[s]`` becomes 0.

    With ``before`` there are as many rows more, of the tokens before the pending ones; and a
    sequence that wants none has rows as well, with ``until`` at n.
    """

    answers: int = 1
    lag: int = 0
    before: bool = False

    name = "draft_rows"
    limits = limited(**DraftedRows.limits, answers=up_to(512), lag=(0, 1))

    @property
    def made(self) -> int:
        """Rows that are made."""
        return self.answers * (2 if self.before else 1)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.wanting_params,
            Param("found", "u32", ("sequences",), Access.INOUT),
            Param("draft_sequence", "u32", ("made",), Access.OUT),
            Param("draft_position", "u32", ("made",), Access.OUT),
            Param("token_position", "u32", ("made",), Access.OUT),
            Param("until", "u32", ("answers",), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        threads = 32 * ceil_div(max(self.rows, self.made), 32)
        return LaunchShape(grid=(1, 1, 1), block=(threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        found = inputs["found"].copy()
        sequence = np.full(self.made, inputs["sequence"][0], np.uint32)
        position, token = (np.full(self.made, IDLE, np.uint32) for _ in range(2))
        until = np.zeros(self.answers, np.uint32)
        for at, row in enumerate(np.flatnonzero(inputs["place"] == 0)):
            s = inputs["sequence"][row]
            if inputs["position"][row] >= self.max_len:
                continue
            found[s] = 0
            known = int(inputs["known"][s])
            wanted = min(int(inputs["wanted"][row]), self.max_len - known)
            if at >= self.answers or not (wanted or self.before):
                continue
            sequence[at], until[at] = s, known - 1 + wanted
            for to, of in [(at, known - 1), *([(self.answers + at, known - 2)] * self.before)]:
                sequence[to] = s
                if of >= 0:
                    token[to] = of
                if of >= self.lag:
                    position[to] = of - self.lag
        return {
            "found": found,
            "draft_sequence": sequence,
            "draft_position": position,
            "token_position": token,
            "until": until,
        }

    @classmethod
    def examples(cls) -> dict[str, DraftRows]:
        return {
            "one row": cls(max_len=9),
            "rows of some sequences": cls(max_len=50, rows=13, sequences=5, answers=4, lag=1),
            "with those before": cls(max_len=40, rows=48, sequences=30, answers=40, before=True),
        }

    def bytes_moved(self) -> int:
        """Rows, and what is made of them."""
        return 24 * self.rows + 16 * self.made

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        rows = self._random_rows(rng, min(MOST_DRAFTS, 7))
        rows["found"] = rng.integers(0, 9, self.sequences).astype(np.uint32)
        return {p.name: rows[p.name] for p in self.params if p.access is not Access.OUT}
