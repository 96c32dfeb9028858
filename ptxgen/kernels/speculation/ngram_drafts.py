"""Drafts from the text itself: what followed the last tokens where they were before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS, MOST_NGRAM
from urdir.ptxgen.kernels.speculation.spec import DraftedRows
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param


@dataclass(frozen=True)
class NgramDrafts(DraftedRows):
    """Drafts of the latest earlier occurrence of the last tokens (prompt lookup).

    For the row r of a pending token (``place[r]`` 0) of a sequence s that goes on: the last
    ``longest`` tokens of its ``known[s]`` are looked for at earlier places, then one fewer, down to
    ``shortest``; of the longest that is found the latest. The tokens after it are written after the
    known ones, ``wanted[r]`` of them if ``max_len`` allows; beyond the known tokens the drafts
    repeat themselves. ``found[s]`` is their number, 0 if nothing is found; with ``always`` the last
    token is then repeated.
    """

    longest: int = 4
    shortest: int = 2
    always: bool = False

    name = "ngram_drafts"

    threads = 1024
    #: Tokens that a thread loads before it looks at them.
    unroll = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.shortest <= self.longest <= MOST_NGRAM:
            raise PtxgenError(
                f"ngram_drafts: {self.shortest} to {self.longest} tokens: expected 1 to "
                f"{MOST_NGRAM}"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.wanting_params,
            Param("tokens", "u32", ("sequences", "max_len"), Access.INOUT),
            Param("found", "u32", ("sequences",), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(self.threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        tokens, found = inputs["tokens"].copy(), inputs["found"].copy()
        for row in np.flatnonzero(inputs["place"] == 0):
            s = inputs["sequence"][row]
            if inputs["position"][row] >= self.max_len:
                continue
            known = int(inputs["known"][s])
            text = tokens[s, :known].tolist()
            drafts = self.drafts(text, min(int(inputs["wanted"][row]), self.max_len - known))
            tokens[s, known : known + len(drafts)] = drafts
            found[s] = len(drafts)
        return {"tokens": tokens, "found": found}

    def drafts(self, text: list[int], wanted: int) -> list[int]:
        """Up to ``wanted`` drafts after a text."""
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            for end in range(len(text) - 1, n - 1, -1):
                if text[end - n : end] == text[-n:]:
                    after = text[end:]
                    return [after[i % len(after)] for i in range(wanted)]
        return [text[-1]] * wanted if self.always else []

    @classmethod
    def examples(cls) -> dict[str, NgramDrafts]:
        return {
            "one token": cls(max_len=1),
            "rows of some sequences": cls(max_len=50, rows=23, sequences=7),
            "long": cls(max_len=9000, rows=12, sequences=3),
            "of any length": cls(max_len=2500, rows=9, sequences=4, longest=12, shortest=1),
            "always": cls(max_len=300, rows=20, sequences=4, always=True),
        }

    def bytes_moved(self) -> int:
        """The tokens of one sequence for each row of a pending token, at most."""
        return 4 * min(self.rows, self.sequences) * self.max_len

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Texts of few different tokens, so that some of the last ones were there before."""
        rows = self._random_rows(rng, min(MOST_DRAFTS, 7))
        letters = rng.choice([2, 5, 40], (self.sequences, 1))
        tokens = rng.integers(0, letters, (self.sequences, self.max_len))
        far = rng.random((self.sequences, 1)) < 0.3  # the last tokens are rare ones
        last = np.arange(self.max_len) >= rows["known"][:, None].astype(np.int64) - 5
        rows["tokens"] = np.where(far & last, tokens + 1000, tokens).astype(np.uint32)
        rows["found"] = rng.integers(0, 9, self.sequences).astype(np.uint32)
        return {p.name: rows[p.name] for p in self.params}
