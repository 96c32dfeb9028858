"""Choosing the next token from logits on the host; the mathematics is ``ptxgen.sampling``'s.

The order is llama.cpp's: repetition penalty, top-k, top-p, min-p, temperature, draw. Each filter
works on the distribution that the one before left, and the temperature does not affect what
top-p and min-p keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ModelError, SettingsError
from urdir.ptxgen.kernels import sampling as reference

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose; SettingsError names the flag and the value that is out of range."""

    temperature: float = 0.8  # 0 or less: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the penalty looks back; -1: all
    seed: int = 0
    nonce: int = 0  # answers that share a seed and are to differ take different ones
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit
    logprobs: int | None = None  # how many of the likeliest tokens to report; None: nothing

    def __post_init__(self) -> None:
        for flag, field, is_good, wanted in _CHECKS:
            value = getattr(self, field)
            if not is_good(value):
                raise SettingsError(f"{flag} {value}: expected {wanted}")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, which the device can do by itself."""
        return self.temperature <= 0.0 and not self.penalises

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change the logits."""
        return self.repeat_penalty != 1.0 and self.repeat_last_n != 0

    @property
    def words(self) -> NDArray[np.uint32]:
        """The settings but for the seed as the sampling kernel reads them, (8,) u32."""
        return reference.pack_settings(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
        )


_CHECKS: tuple[tuple[str, str, Callable[[float], bool], str], ...] = (
    ("--temp", "temperature", math.isfinite, "a finite number (0: greedy)"),
    ("--top-k", "top_k", lambda v: v >= 0, "0 (off) or more"),
    ("--top-p", "top_p", lambda v: 0.0 <= v <= 1.0, "0 to 1 (off)"),
    ("--min-p", "min_p", lambda v: 0.0 <= v <= 1.0, "0 (off) to 1"),
    ("--repeat-penalty", "repeat_penalty", lambda v: 0.0 < v < math.inf, "more than 0 (1: off)"),
    ("--repeat-last-n", "repeat_last_n", lambda v: v >= -1, "-1 (all), 0 (off) or more"),
    ("--seed", "seed", lambda v: 0 <= v < 1 << 64, "0 to 2^64 - 1"),
)


def sample(
    logits: Logits,
    settings: SamplingSettings,
    position: int,
    previous: Sequence[int] = (),
    sequence: int = 0,
) -> int:
    """The next token id.

    `logits` (n_vocab,) f32; `position` is the place of the token in the sequence, `sequence` the
    number of that one among those in memory: the random number depends on them and the seed alone,
    so that a sequence can be repeated from anywhere; `previous` are the tokens before it. Raises
    ModelError for logits that are no distribution.
    """
    return reference.sample(
        _checked(logits),
        settings.words,
        np.asarray(previous, np.int64),
        seed=settings.seed,
        sequence=sequence,
        position=position,
    )


def distribution(
    logits: Logits, settings: SamplingSettings, previous: Sequence[int] = ()
) -> tuple[Ids, NDArray[np.float64]]:
    """What `sample` draws from: ids (n,), most likely first, and their probabilities (n,) f64."""
    return reference.distribution(_checked(logits), settings.words, np.asarray(previous, np.int64))


def uniform(seed: int, position: int, sequence: int = 0) -> float:
    """A random number in [0, 1), a function of (seed, sequence, position) alone."""
    return reference.uniform(seed, sequence, position)


def _checked(logits: Logits) -> Logits:
    highest = logits.max()
    if not np.isfinite(highest):  # NaN spreads into the maximum
        raise ModelError(f"the highest logit is {highest}: the forward pass went wrong")
    return logits
