"""Choosing the next token from logits: the settings as the device reads them, and the reference.

The order is llama.cpp's: repetition penalty, top-k, top-p, min-p, temperature, draw. Each filter
works on the distribution that the one before left, and the temperature does not affect what
top-p and min-p keep. Penalty and thresholds are rounded to f32 here as on the device, so that both
keep the same tokens; probabilities are f64 here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Ids = npt.NDArray[np.int64]

#: The settings of one sequence in device memory: eight 32-bit words.
SETTINGS = np.dtype(
    [
        ("temperature", np.float32),  # 0 or less: greedy
        ("top_k", np.uint32),  # 0: off
        ("top_p", np.float32),  # 1 or more: off
        ("log_min_p", np.float32),  # natural logarithm of min_p; -inf: off
        ("repeat_penalty", np.float32),  # 1: off
        ("repeat_last_n", np.uint32),  # 0: off; 2^32 - 1: the whole history
        ("reserved", np.uint32, 2),
    ]
)
SETTINGS_WORDS = SETTINGS.itemsize // 4

_HIGHEST = float(np.finfo(np.float32).max)
_LOWEST_PENALTY = float(np.finfo(np.float32).tiny)


def pack_settings(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    repeat_last_n: int = 0,
) -> Words:
    """One sequence's row of the kernel's ``settings``, (8,) u32.

    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``repeat_penalty`` 1 turn a filter off;
    ``repeat_last_n`` -1 looks back over the whole history.
    """
    record = np.zeros(1, SETTINGS)
    record["temperature"] = np.clip(temperature, -_HIGHEST, _HIGHEST)
    record["top_k"] = min(top_k, 2**32 - 1)
    record["top_p"] = top_p
    record["log_min_p"] = math.log(min_p) if min_p > 0.0 else -math.inf
    record["repeat_penalty"] = np.clip(repeat_penalty, _LOWEST_PENALTY, _HIGHEST)
    record["repeat_last_n"] = 2**32 - 1 if repeat_last_n < 0 else min(repeat_last_n, 2**32 - 1)
    return record.view(np.uint32)


def random_bits(seed: int, sequence: int, position: int) -> int:
    """64 random bits, a function of (seed, sequence, position) alone.

    Philox4x64-10, a counter-based generator (Salmon et al. 2011), keyed by the seed; position and
    sequence are the low words of its counter.
    """
    counter = position + (sequence << 64)
    return int(np.random.Philox(key=seed, counter=counter).random_raw())


def uniform(seed: int, sequence: int, position: int) -> float:
    """A random number in [0, 1): the highest 53 of the ``random_bits``."""
    return (random_bits(seed, sequence, position) >> 11) * 2.0**-53


def sample(
    logits: Logits,
    settings: Words,
    history: npt.ArrayLike,
    *,
    seed: int,
    sequence: int,
    position: int,
) -> int:
    """The next token id.

    ``logits`` (n_vocab,) f32, NaN counting as -inf; ``settings`` (8,) u32, see `pack_settings`;
    ``history`` the tokens before the one to draw, whose place in the sequence is ``position``.
    """
    ids, probabilities = distribution(logits, settings, history)
    cumulative = np.cumsum(probabilities)
    drawn = uniform(seed, sequence, position) * cumulative[-1]
    drawn = min(drawn, np.nextafter(cumulative[-1], 0.0))  # rounding must not lead past the end
    return int(ids[np.searchsorted(cumulative, drawn, side="right")])


def distribution(
    logits: Logits, settings: Words, history: npt.ArrayLike
) -> tuple[Ids, npt.NDArray[np.float64]]:
    """What `sample` draws from: ids (n,), most likely first, and their probabilities (n,) f64.

    One id where the temperature is 0 or less, and where the highest logit is infinite.
    """
    choice = np.ascontiguousarray(settings).view(SETTINGS)[0]
    penalised = _penalise(np.where(np.isnan(logits), np.float32(-np.inf), logits), choice, history)
    best = np.argmax(penalised)  # numpy takes the lowest index of equals
    if choice["temperature"] <= 0.0 or not np.isfinite(penalised[best]):
        return np.array([best], np.int64), np.ones(1)
    ids = _top_k(penalised, int(choice["top_k"]))
    kept = penalised[ids]
    kept = kept[: _top_p_count(kept, float(choice["top_p"]))]
    kept = kept[kept >= kept[0] + choice["log_min_p"]]  # p >= min_p * highest p, both in f32
    return ids[: len(kept)], _softmax(kept, float(choice["temperature"]))


def _penalise(logits: Logits, choice: Any, history: npt.ArrayLike) -> Logits:
    """Make tokens seen lately less likely (Keskar et al. 2019; negative logits as llama.cpp).

    Changes ``logits``; tokens that are not in the vocabulary are passed over.
    """
    tokens = np.asarray(history, np.int64)
    seen = np.unique(tokens[max(0, len(tokens) - int(choice["repeat_last_n"])) :])
    seen = seen[seen < len(logits)]
    values, factor = logits[seen], choice["repeat_penalty"]
    with np.errstate(over="ignore"):
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    return logits


def _top_k(logits: Logits, k: int) -> Ids:
    """Ids of the k highest logits, highest first, the lowest id first among equals."""
    candidates: Ids = np.arange(len(logits))
    if 0 < k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        candidates = np.flatnonzero(logits >= threshold)
    order = np.argsort(-logits[candidates], kind="stable")
    ids: Ids = candidates[order]
    return ids[:k] if k else ids


def _top_p_count(logits: Logits, top_p: float) -> int:
    """How many of the sorted candidates it takes to reach the probability ``top_p``; at least
    one."""
    if top_p >= 1.0:
        return len(logits)
    return min(int(np.searchsorted(np.cumsum(_softmax(logits)), top_p)) + 1, len(logits))


def _softmax(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    weights: npt.NDArray[np.float64] = np.exp((values - values.max()) / temperature)
    weights /= weights.sum()
    return weights
