"""Choosing the next token from logits, in numpy (the reference for samplers on the device).

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
    logits: Logits, settings: SamplingSettings, position: int, previous: Sequence[int] = ()
) -> int:
    """The next token id.

    `logits` (n_vocab,) f32; `position` is the place of the token in the sequence: the random number
    depends on it and the seed alone, so that a sequence can be repeated from anywhere; `previous`
    are the tokens before it. Raises ModelError for logits that are no distribution.
    """
    penalised = _penalise(_checked(logits), settings, previous)
    if settings.temperature <= 0.0:
        return int(np.argmax(penalised))  # numpy takes the lowest index of equals
    ids, probabilities = _filtered(penalised, settings)
    cumulative = np.cumsum(probabilities)
    drawn = uniform(settings.seed, position) * cumulative[-1]
    return int(ids[min(int(np.searchsorted(cumulative, drawn, side="right")), len(ids) - 1)])


def distribution(
    logits: Logits, settings: SamplingSettings, previous: Sequence[int] = ()
) -> tuple[Ids, NDArray[np.float64]]:
    """What `sample` draws from: ids (n,), most likely first, and their probabilities (n,) f64."""
    penalised = _penalise(_checked(logits), settings, previous)
    if settings.temperature <= 0.0:
        return np.array([np.argmax(penalised)], np.int64), np.ones(1)
    return _filtered(penalised, settings)


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1), a function of (seed, position) alone.

    Philox, a counter-based generator (Salmon et al. 2011), with the position as its counter.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _checked(logits: Logits) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    highest = values.max()
    if not np.isfinite(highest):  # NaN spreads into the maximum
        raise ModelError(f"the highest logit is {highest}: the forward pass went wrong")
    return values


def _penalise(
    logits: NDArray[np.float64], settings: SamplingSettings, previous: Sequence[int]
) -> NDArray[np.float64]:
    """Make tokens seen lately less likely (Keskar et al. 2019; negative logits as llama.cpp)."""
    if not settings.penalises:
        return logits
    recent = previous if settings.repeat_last_n < 0 else previous[-settings.repeat_last_n :]
    seen = np.unique(np.asarray(recent, np.int64))
    values = logits[seen]
    factor = settings.repeat_penalty
    logits[seen] = np.where(values > 0, values / factor, values * factor)
    return logits


def _filtered(
    logits: NDArray[np.float64], settings: SamplingSettings
) -> tuple[Ids, NDArray[np.float64]]:
    ids = _top_k(logits, settings.top_k)
    kept = logits[ids]
    kept = kept[: _top_p_count(kept, settings.top_p)]
    kept = kept[: _min_p_count(kept, settings.min_p)]
    return ids[: len(kept)], _softmax(kept / settings.temperature)


def _top_k(logits: NDArray[np.float64], k: int) -> Ids:
    """Ids of the k highest logits, highest first, the lowest id first among equals."""
    candidates: Ids = np.arange(len(logits))
    if 0 < k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")
    ids: Ids = candidates[order]
    return ids[:k] if k else ids


def _top_p_count(logits: NDArray[np.float64], top_p: float) -> int:
    """How many of the sorted candidates it takes to reach the probability `top_p`; at least one."""
    if top_p >= 1.0:
        return len(logits)
    return min(int(np.searchsorted(np.cumsum(_softmax(logits)), top_p)) + 1, len(logits))


def _min_p_count(logits: NDArray[np.float64], min_p: float) -> int:
    """How many of the sorted candidates have at least `min_p` of the highest probability."""
    if min_p <= 0.0:
        return len(logits)
    return int(np.count_nonzero(logits >= logits[0] + math.log(min_p)))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights
