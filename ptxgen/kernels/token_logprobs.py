"""Log-probabilities of the chosen token and of the likeliest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.logits_rows import LogitsRows
from urdir.ptxgen.kernels.sampling import (
    log_probabilities,
    most_likely,
    pack_settings,
    unpack_settings,
)
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN, MOST_LIKELY
from urdir.ptxgen.limits import POWERS_OF_TWO, limited
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance


@dataclass(frozen=True)
class TokenLogprobs(LogitsRows):
    """Log-probabilities of each row's chosen token and of its likeliest tokens.

    They are ln softmax(``logits[r]``) of the model's own logits, without bias, penalties, masks,
    filters and temperature (OpenAI's logprobs; vLLM's raw_logprobs). Row r has chosen
    ``sampled[r]`` after the token at ``position[r]`` of sequence s = ``sequence[r]``; if
    ``settings[s]`` request it, ``logprobs[s, position[r] % slots]`` gets the value of the chosen
    token, then those of the likeliest, whose ids are in ``likely``, the lowest index first among
    equals. Both may be page-locked host memory. A row without a choice (INVALID_TOKEN) and a
    padding row (position ``max_len`` or more) leave them unchanged.
    """

    slots: int = 1

    name = "token_logprobs"
    limits = limited(**LogitsRows.limits, slots=POWERS_OF_TWO)
    params = (
        Param("logits", "f32", ("rows", "n_vocab"), Access.IN),
        Param("settings", "u32", ("sequences", "settings_words"), Access.IN),
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
        Param("sampled", "u32", ("rows",), Access.IN),
        Param("logprobs", "f32", ("sequences", "slots", "entries"), Access.INOUT),
        Param("likely", "u32", ("sequences", "slots", "most"), Access.INOUT),
    )
    #: f32 sums of a row and approximate exponentials and logarithm: relative errors of a sum,
    #: absolute ones of its logarithm.
    tolerance = Tolerance(atol=1e-5, rtol=1e-6)

    threads = 1024
    most = MOST_LIKELY
    entries = 1 + MOST_LIKELY

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(self.threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logprobs, names = inputs["logprobs"].copy(), inputs["likely"].copy()
        for row, position in enumerate(inputs["position"].tolist()):
            token = int(inputs["sampled"][row])
            if position >= self.max_len or token >= self.n_vocab:
                continue
            s = inputs["sequence"][row]
            settings = unpack_settings(inputs["settings"][s])
            if not settings["logprobs"]:
                continue
            values = log_probabilities(inputs["logits"][row])
            likely = most_likely(inputs["logits"][row], int(settings["logprobs"]) - 1)
            slot = (s, position % self.slots)
            names[slot][: len(likely)] = likely
            logprobs[slot][: 1 + len(likely)] = [values[token], *values[likely]]
        return {"logprobs": logprobs, "likely": names}

    @classmethod
    def examples(cls) -> dict[str, TokenLogprobs]:
        return {
            "one token": cls(n_vocab=1, max_len=1),
            "rows": cls(n_vocab=61, max_len=9, rows=3, sequences=4, slots=2),
            "odd": cls(n_vocab=2051, max_len=40, rows=4, sequences=4, slots=4),
            "long context": cls(n_vocab=2048, max_len=300, rows=3, sequences=6),
            "large vocabulary": cls(n_vocab=128_256, max_len=100, slots=8),
        }

    def flops(self) -> int:
        return 4 * self.rows * self.n_vocab

    def bytes_moved(self) -> int:
        """The logits and the rows' state."""
        return self.rows * (4 * self.n_vocab + 16)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows with and without requests, one without a choice, and a padding row if there are
        several. Logits lie on a grid, so that some are equal."""
        rows = self._random_rows(rng, rng.integers(1, self.max_len, self.sequences, endpoint=True))
        sampled = rng.integers(0, self.n_vocab, self.rows)
        if self.rows > 2:
            sampled[np.flatnonzero(rows["position"] < self.max_len)[0]] = INVALID_TOKEN
        wanted = [None, 0, 1, 5, MOST_LIKELY]
        return {
            **rows,
            "logits": np.round(self._random_logits(rng), 2),
            "settings": np.stack(
                [
                    pack_settings(logprobs=wanted[int(which)])
                    for which in rng.integers(self.rows == 1, len(wanted), self.sequences)
                ]
            ),
            "sampled": sampled.astype(np.uint32),
            "logprobs": np.zeros((self.sequences, self.slots, self.entries), np.float32),
            "likely": np.zeros((self.sequences, self.slots, self.most), np.uint32),
        }
