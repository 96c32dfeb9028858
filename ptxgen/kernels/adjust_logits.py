"""Logit adjustments before sampling: bias, penalties, allowed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.logits_rows import LogitsRows
from urdir.ptxgen.kernels.sampling import SETTINGS_WORDS, adjust, random_settings, unpack_settings
from urdir.ptxgen.limits import limited
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class AdjustLogits(LogitsRows):
    """Logit bias, repetition, presence and frequency penalties, and masks of allowed tokens.

    Row r is the token at ``position[r]`` of sequence s = ``sequence[r]``; ``logits[r]`` are changed
    in place by ``settings[s]`` (`sampling.adjust`). Penalties use ``tokens[s]`` up to and including
    ``position[r]``. If ``masked[r]`` is not 0, only the tokens whose bits are set in ``masks[r]``
    are allowed. Rows whose settings request log-probabilities store their original logits in
    ``raw[r]``. A position of ``max_len`` or more marks a padding row.

    A row is cut into slices of ``width`` logits, one CTA each, which counts the history's tokens of
    its slice in shared memory. Rows without adjustments end at once.
    """

    width: int = 8192

    name = "adjust_logits"
    limits = limited(**LogitsRows.limits, width=(2048, 4096, 8192))
    params = (
        Param("logits", "f32", ("rows", "n_vocab"), Access.INOUT),
        Param("raw", "f32", ("rows", "n_vocab"), Access.INOUT),
        Param("settings", "u32", ("sequences", "settings_words"), Access.IN),
        Param("tokens", "u32", ("sequences", "max_len"), Access.IN),
        Param("masks", "u32", ("rows", "mask_words"), Access.IN),
        Param("masked", "u32", ("rows",), Access.IN),
        Param("sequence", "u32", ("rows",), Access.IN),
        Param("position", "u32", ("rows",), Access.IN),
    )

    #: At least one thread per bias of a sequence.
    threads = 512

    @property
    def mask_words(self) -> int:
        """Words in a row's mask."""
        return ceil_div(self.n_vocab, 32)

    @property
    def slices(self) -> int:
        """Slices per row."""
        return ceil_div(self.n_vocab, self.width)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.slices, self.rows, 1), block=(self.threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits, raw = inputs["logits"].copy(), inputs["raw"].copy()
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.max_len:
                s = int(inputs["sequence"][row])
                settings, history = inputs["settings"][s], inputs["tokens"][s, : position + 1]
                mask = inputs["masks"][row] if inputs["masked"][row] else None
                if unpack_settings(settings)["logprobs"]:
                    raw[row] = logits[row]
                logits[row] = adjust(logits[row], settings, history, mask)
        return {"logits": logits, "raw": raw}

    @classmethod
    def examples(cls) -> dict[str, AdjustLogits]:
        return {
            "one token": cls(n_vocab=1, max_len=1),
            "odd": cls(n_vocab=61, max_len=9, rows=3, sequences=4),
            "a whole slice": cls(n_vocab=8192, max_len=40),
            "odd slices": cls(n_vocab=4099, max_len=300, rows=4, sequences=5, width=2048),
            "slices": cls(n_vocab=6148, max_len=700, rows=5, sequences=5, width=2048),
            "large vocabulary": cls(n_vocab=128_256, max_len=3000),
        }

    def flops(self) -> int:
        return 4 * self.rows * self.max_len

    def bytes_moved(self) -> int:
        """Bytes of the rows' state: the logits read depend on the settings."""
        return self.rows * (4 * SETTINGS_WORDS + 12)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows with settings of all kinds, and a padding row if there are several.

        Half of the tokens repeat.
        """
        known = rng.integers(1, self.max_len, self.sequences, endpoint=True)
        rows = self._random_rows(rng, known)
        tokens = rng.integers(0, self.n_vocab + 3, (self.sequences, self.max_len), np.uint32)
        often = rng.random(tokens.shape) < 0.5
        tokens[often] = (tokens[often] % 5) * (self.n_vocab // 5)
        return {
            **rows,
            "logits": self._random_logits(rng),
            "raw": np.zeros((self.rows, self.n_vocab), np.float32),
            "settings": np.stack([self._settings(rng, int(n)) for n in known]),
            "tokens": tokens,
            "masks": rng.integers(0, 2**32, (self.rows, self.mask_words), np.uint32),
            "masked": rng.integers(0, 2, self.rows).astype(np.uint32),
        }

    def _settings(self, rng: np.random.Generator, known: int) -> Array:
        """One sequence's settings: every adjustment on or off."""
        biased = rng.permutation(self.n_vocab)[: rng.choice([0, 1, 7, 300])]
        return random_settings(
            rng,
            logit_bias={int(token): float(rng.uniform(-100, 100)) for token in biased},
            answer_at=int(rng.integers(0, known, endpoint=True)),
            min_tokens=int(rng.choice([0, 2, self.max_len])),
            end_ids=rng.integers(0, self.n_vocab + 1, rng.integers(0, 17)).tolist(),
            logprobs=None if rng.random() < 0.5 else 3,
        )
