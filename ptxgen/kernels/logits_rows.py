"""Base of kernels that read the logits of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.ptxgen.kernels.sampling import OFFSETS, SETTINGS_WORDS
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, limited, up_to
from urdir.ptxgen.spec import Array, KernelSpec


@dataclass(frozen=True)
class LogitsRows(KernelSpec):
    """A kernel that reads ``logits`` (rows, n_vocab) of ``rows`` of ``sequences`` of up to
    ``max_len`` tokens, and ``settings`` of each sequence.

    Raises PtxgenError for sizes that are out of range.
    """

    n_vocab: int
    max_len: int
    rows: int = 1
    sequences: int = 1

    limits = limited(
        n_vocab=up_to(1 << 28), max_len=POSITIVE_31_BITS, rows=GRID_ROWS, sequences=POSITIVE
    )

    #: Vectors, or tokens of a history, that a thread loads before processing them.
    unroll = 4
    settings_words = SETTINGS_WORDS
    offsets = OFFSETS

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"rows"})

    @property
    def vector(self) -> int:
        """Logits per access: four if every row stays 16-byte aligned."""
        return 4 if self.n_vocab % 4 == 0 else 1

    def _random_logits(self, rng: np.random.Generator) -> Array:
        return rng.normal(0.0, 3.0, (self.rows, self.n_vocab)).astype(np.float32)

    def _random_rows(self, rng: np.random.Generator, known: Array) -> dict[str, Array]:
        """``sequence`` and ``position`` of rows, each the last of ``known`` (sequences) tokens; one
        of several is a padding row."""
        sequence = rng.permutation(max(self.sequences, self.rows))[: self.rows] % self.sequences
        position = known[sequence] - 1
        if self.rows > 1:
            position[rng.integers(self.rows)] = self.max_len + 1
        return {"sequence": sequence.astype(np.uint32), "position": position.astype(np.uint32)}
