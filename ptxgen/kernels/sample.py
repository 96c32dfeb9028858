"""Sampling: choose the next token from logits, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.logits_rows import LogitsRows
from urdir.ptxgen.kernels.sampling import SETTINGS_WORDS, random_settings, sample
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class Sample(LogitsRows):
    """The next token of every row: filters, temperature, draw.

    Row r is the token at ``position[r]`` of sequence s = ``sequence[r]``; its ``logits[r]``,
    possibly changed by AdjustLogits, choose the next token by ``settings[s]``
    (`sampling.pack_settings`). The random number depends only on (seed, nonce, place of the chosen
    token). A temperature of 0 or less takes the most likely token, the lowest index among equals. A
    row with a NaN, or whose highest logit is infinite, gets INVALID_TOKEN. A row whose position is
    ``max_len`` or more is a padding row and gets 0.

    Weights are f32 powers of two, summed as 64-bit integers: no sum depends on order.
    """

    name = "sample"
    params = (
        Param("logits", "f32", ("rows", "n_vocab"), Access.IN),
        Param("settings", "u32", ("sequences", "settings_words"), Access.IN),
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
        Param("sampled", "u32", ("rows",), Access.OUT),
    )

    threads = 1024
    #: Bits per digit of the radix selection.
    digit_bits = 10

    @property
    def index_bits(self) -> int:
        """Bits of an index: with the 32 of a logit they make five or six digits."""
        return 18 if self.n_vocab <= 2**18 else 28

    @property
    def first_shift(self) -> int:
        """Bits below the first digit."""
        return 32 + self.index_bits - self.digit_bits

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(self.threads, 1, 1))

    @property
    def rank(self) -> int:
        """The head of the distribution ends with the logit of this rank among the threads' maxima.

        The head then has about 1.4 times as many logits, at most one per thread. 0: it has all.
        """
        if self.n_vocab <= self.threads:
            return 0
        return min(self.threads, ceil_div(self.n_vocab, self.vector)) // 2

    def reference(self, **inputs: Any) -> dict[str, Array]:
        sampled = np.zeros(self.rows, np.uint32)
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.max_len:
                s = int(inputs["sequence"][row])
                sampled[row] = sample(inputs["logits"][row], inputs["settings"][s], position + 1)
        return {"sampled": sampled}

    @classmethod
    def examples(cls) -> dict[str, Sample]:
        return {
            "one token": cls(n_vocab=1, max_len=1),
            "rows": cls(n_vocab=61, max_len=9, rows=3, sequences=4),
            "1024 tokens": cls(n_vocab=1024, max_len=40),
            "2051 tokens": cls(n_vocab=2051, max_len=40, rows=2, sequences=2),
            "long context": cls(n_vocab=2048, max_len=300, rows=5, sequences=6),
            "large vocabulary": cls(n_vocab=151_936, max_len=100),
            "six digits": cls(n_vocab=262_208, max_len=7),
        }

    def flops(self) -> int:
        return 2 * self.rows * self.n_vocab

    def bytes_moved(self) -> int:
        """The logits and the rows' state."""
        return self.rows * (4 * self.n_vocab + 4 * SETTINGS_WORDS + 12)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows with settings of all kinds, some greedy, and a padding row if there are several."""
        known = rng.integers(1, self.max_len, self.sequences, endpoint=True)
        return {
            **self._random_rows(rng, known),
            "logits": self._random_logits(rng),
            "settings": np.stack([random_settings(rng) for _ in range(self.sequences)]),
        }
