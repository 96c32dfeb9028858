"""Rows of a table for the n-grams that end in a token (n-gram embeddings)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

THREADS = 128
#: Tokens of an n-gram, and rows of a token, at most.
MOST_NGRAM, MOST_HEADS = 8, 64
#: Rows of a table end before this number.
MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class NgramHash:
    """Which rows of a table the n-grams of a token have: of 2 to n tokens, as many rows each.

    The number of an n-gram of m tokens is t[0] * multipliers[0] ^ ... ^ t[m - 1] *
    multipliers[m - 1], in 64 bits, t[0] being the token and t[i] that i places before it. Row h is
    the number modulo ``sizes[h]``, plus ``offsets[h]``. Places before the sequence's first token,
    and from an earlier token ``boundary`` on back, count as ``boundary``.
    """

    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    boundary: int

    def __post_init__(self) -> None:
        n, heads = len(self.multipliers), len(self.offsets)
        if not 2 <= n <= MOST_NGRAM or not 1 <= heads <= MOST_HEADS or heads % (n - 1):
            raise PtxgenError(
                f"ngram_rows: {heads} rows for n-grams of 2 to {n} tokens: n is 2 to {MOST_NGRAM}, "
                f"rows are a multiple of n - 1, up to {MOST_HEADS}"
            )
        ends = [a + b for a, b in zip(self.offsets, self.sizes, strict=True)]
        if min(self.sizes) < 1 or min(self.offsets) < 0 or max(ends) > MOST_ROWS:
            raise PtxgenError(f"ngram_rows: rows beyond {MOST_ROWS}, or none")

    @property
    def heads(self) -> int:
        """Rows of a token."""
        return len(self.offsets)

    @property
    def each(self) -> int:
        """Rows of an n-gram."""
        return self.heads // (len(self.multipliers) - 1)

    @property
    def rows(self) -> int:
        """The row after the last one."""
        return max(a + b for a, b in zip(self.offsets, self.sizes, strict=True))

    def of(self, tokens: Array) -> Array:
        """Rows (heads,) of the last of a sequence's ``tokens``."""
        context = [int(tokens[-1])]
        for place in range(1, len(self.multipliers)):
            ended = place > 1 and context[-1] == self.boundary
            inside = place < len(tokens) and not ended
            context.append(int(tokens[-1 - place]) if inside else self.boundary)
        number, found = context[0] * self.multipliers[0], []
        for place in range(1, len(context)):
            number ^= context[place] * self.multipliers[place]
            for head in range((place - 1) * self.each, place * self.each):
                found.append(number % 2**64 % self.sizes[head] + self.offsets[head])
        return np.array(found, np.uint32)


@dataclass(frozen=True)
class NgramRows(KernelSpec):
    """y[r] (heads) = the rows of a table that ``hash`` gives for the token at position[r] of
    sequence[r] and those before it; zeros of a padding row, with a position from ``max_len`` on."""

    hash: NgramHash
    max_len: int
    rows: int = 1
    sequences: int = 1

    name = "ngram_rows"
    limits = limited(rows=POSITIVE, sequences=POSITIVE, max_len=POSITIVE)
    params = (
        Param("tokens", "u32", ("sequences", "max_len"), Access.IN),
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
        Param("y", "u32", ("rows", "heads"), Access.OUT),
    )

    @property
    def heads(self) -> int:
        """Rows of a token."""
        return self.hash.heads

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.rows, THREADS), 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        y = np.zeros((self.rows, self.heads), np.uint32)
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.max_len:
                tokens = inputs["tokens"][inputs["sequence"][row], : position + 1]
                y[row] = self.hash.of(tokens)
        return {"y": y}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Few different tokens, so that many are the boundary; the first and the second position;
        the last of several rows is a padding row."""
        positions = rng.integers(0, self.max_len, self.rows)
        positions[: min(2, self.rows)] = np.arange(min(2, self.rows))
        if self.rows > 2:
            positions[-1] = self.max_len + 5
        tokens = rng.integers(0, 4, (self.sequences, self.max_len)) + self.hash.boundary - 2
        sequences = rng.integers(0, self.sequences, self.rows)
        given = {"tokens": tokens, "sequence": sequences, "position": positions}
        return {name: of.astype(np.uint32) for name, of in given.items()}

    @classmethod
    def examples(cls) -> dict[str, NgramRows]:
        wide = NgramHash(
            (1234567890123456789, 987654321987654321, 0xFFFFFFFFFFFFFFC5),
            tuple(range(0, 4000, 1000)),
            (997, 991, 983, 977),
            200_003,
        )
        return {
            "pairs": cls(NgramHash((1, 3), (5,), (128,), 2), 30, 7, 2),
            "triples": cls(wide, 40, 150, 3),
            "one row": cls(NgramHash((3, 5, 7, 9), (0, 9, 20), (9, 11, 5), 3), 16),
        }
