"""Scored rows: rows of prompts whose next tokens' log-probabilities are wanted.

Their logits are computed some rows at a time, where those lie later that tokens are chosen from: a
step needs no more memory for a long prompt than for a short one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from urdir.driver.context import close_all
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.sampling_limits import MOST_LIKELY

if TYPE_CHECKING:
    from urdir.driver.device import Device

Words = npt.NDArray[np.uint32]

#: Scored rows of a step, at most. 512 rows of an 8B model are 0.27 GB of logits.
MOST_SCORED = 512
#: Rows whose logits are computed at a time: each time the output matrix is read.
AT_ONCE = 64
#: Steps whose results the host may not have read: they take turns in page-locked memory.
TURNS = 2
#: Names of what each scored row has (`ScoredRows`).
SCORED_WORDS = ("scored_row", "scored_sequence", "scored_turn", "scored_place", "scored_token")

#: Bytes of page-locked memory for results (`ScoresRead`).
SCORES_SIZES = {
    "logprobs": 4 * TURNS * MOST_SCORED * (1 + MOST_LIKELY),
    "likely": 4 * TURNS * MOST_SCORED * MOST_LIKELY,
}

_SIZES = (16, AT_ONCE, 128, 256, MOST_SCORED)


def most_scored(chunk: int) -> int:
    """The most scored rows of a step with up to ``chunk`` rows of prompts."""
    return min(chunk, MOST_SCORED)


def scored_bucket(rows: int, chunk: int) -> int:
    """A number of scored rows that steps have, from ``rows`` on; 0 for none."""
    return min(next(size for size in _SIZES if size >= rows), most_scored(chunk)) if rows else 0


def blocks(rows: int) -> Iterator[tuple[int, int]]:
    """The first of the rows whose logits are computed together, and how many these are."""
    for first in range(0, rows, AT_ONCE):
        yield first, min(AT_ONCE, rows - first)


class TokenScores(NamedTuple):
    """Log-probabilities of tokens of a prompt, given those before: ``values`` (n, 1 + likely) f32,
    each token's own and those of the likeliest tokens, whose ids are ``tokens`` (n, likely) u32."""

    values: npt.NDArray[np.float32]
    tokens: Words

    def packed(self) -> tuple[int, bytes, bytes]:
        """The number of tokens, and the bytes of both arrays."""
        return len(self.values), self.values.tobytes(), self.tokens.tobytes()

    @classmethod
    def unpacked(cls, count: int, values: bytes, tokens: bytes) -> TokenScores:
        """What was `packed`."""
        found = np.frombuffer(values, np.float32).reshape(count, -1)
        likely = found.shape[1] - 1
        return cls(found, np.frombuffer(tokens, np.uint32).reshape(count, likely))


class ScoresRead(Owner):
    """Page-locked memory with the results of scored rows: ``logprobs`` (TURNS, MOST_SCORED, 1 +
    MOST_LIKELY) f32 and ``likely`` (TURNS, MOST_SCORED, MOST_LIKELY) u32, as `TokenLogprobs` has
    them for turns as sequences and rows as positions."""

    def __init__(self, device: Device) -> None:
        self.logprobs, self.likely = (device.pinned(n, of) for of, n in SCORES_SIZES.items())

    def read(self, turn: int, first: int, end: int, likely: int) -> TokenScores:
        """A copy of the results of the scored rows from ``first`` to ``end`` of a complete step."""
        shape = TURNS, MOST_SCORED
        values = self.logprobs.view(np.float32, (*shape, 1 + MOST_LIKELY))
        tokens = self.likely.view(np.uint32, (*shape, MOST_LIKELY))
        some = values[turn, first:end, : 1 + likely].copy()
        return TokenScores(some, tokens[turn, first:end, :likely].copy())

    def close(self) -> None:
        """Free the memory. Idempotent."""
        close_all([self.logprobs, self.likely])


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The scored rows of a step: their numbers among its rows, their sequences, and the tokens
    after them, (n,) u32 each. ``likely``: of how many of the likeliest tokens the log-probabilities
    are wanted too. The step has the ``turn`` of those whose results lie in page-locked memory."""

    row: Words
    sequence: Words
    token: Words
    likely: int
    turn: int

    def words(self, count: int) -> dict[str, Words]:
        """What the device reads, by the names of `SCORED_WORDS`, padded to ``count`` rows."""
        place = np.arange(len(self.row), dtype=np.uint32)
        turn = np.full(count, self.turn, np.uint32)
        values = (self.row, self.sequence, turn, place, self.token)
        found = {}
        for name, value in zip(SCORED_WORDS, values, strict=True):
            found[name] = np.full(count, IDLE if name == "scored_place" else 0, np.uint32)
            found[name][: len(value)] = value
        return found
