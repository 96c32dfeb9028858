"""How a sequence's tokens are chosen, and choosing them on the host; the mathematics is
``ptxgen.sampling``'s.

The order is llama.cpp's: logit bias, repetition penalty, presence and frequency penalty, what is
not allowed, top-k, top-p, min-p, temperature, draw. Each filter works on the distribution that the
one before left, and the temperature does not affect what top-p and min-p keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ModelError, SettingsError
from urdir.ptxgen.kernels import sampling as reference
from urdir.ptxgen.kernels.sampling import INVALID_TOKEN, MOST_BIASES, MOST_END_IDS, MOST_LIKELY

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose; SettingsError names the field and the value that is out of range.

    The repetition penalty is llama.cpp's: it divides logits of tokens among the last
    ``repeat_last_n``, the prompt's too. Presence and frequency penalty are OpenAI's: they count the
    tokens of the answer alone, and subtract from their logits. ``seed`` and ``nonce`` decide the
    random numbers, whatever place in the cache a sequence has: answers that share a seed and are to
    differ take different nonces.
    """

    temperature: float = 0.8  # 0 or less: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the penalty looks back; -1: all
    seed: int = 0
    nonce: int = 0
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    min_tokens: int = 0  # of the answer, before an end id may come
    logprobs: int | None = None  # likely tokens reported beside the chosen one; None: nothing

    def __post_init__(self) -> None:
        for field, is_good, wanted in _CHECKS:
            value = getattr(self, field)
            if not is_good(value):
                raise SettingsError(f"{field} is {value}: expected {wanted}")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, of logits as they are."""
        return self.temperature <= 0.0 and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """True if logits are changed before a token is chosen."""
        repeats = self.repeat_penalty != 1.0 and self.repeat_last_n != 0
        penalises = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return repeats or penalises or bool(self.logit_bias) or self.min_tokens > 0

    def words(self, answer_at: int = 0, end_ids: Iterable[int] = ()) -> Words:
        """The settings as the kernels read them, (SETTINGS_WORDS,) u32.

        The answer begins at ``answer_at``; of its ``end_ids`` the device gets the lowest
        MOST_END_IDS.
        """
        return reference.pack_settings(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.seed,
            nonce=self.nonce,
            logprobs=self.logprobs,
            answer_at=answer_at,
            min_tokens=self.min_tokens,
            end_ids=sorted(end_ids)[:MOST_END_IDS],
        )


def _is_bias(pairs: Any) -> bool:
    ids = {token for token, _ in pairs}
    return len(ids) == len(pairs) <= MOST_BIASES and all(
        0 <= token < INVALID_TOKEN and -100.0 <= bias <= 100.0 for token, bias in pairs
    )


_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", math.isfinite, "a finite number (0: greedy)"),
    ("top_k", lambda v: v >= 0, "0 (off) or more"),
    ("top_p", lambda v: 0.0 <= v <= 1.0, "0 to 1 (off)"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "0 (off) to 1"),
    (
        "repeat_penalty",
        lambda v: 1e-3 <= v < math.inf,
        "0.001 or more (1: off)",
    ),
    ("repeat_last_n", lambda v: v >= -1, "-1 (all), 0 (off) or more"),
    ("presence_penalty", lambda v: abs(v) <= 100.0, "-100 to 100 (0: off)"),
    ("frequency_penalty", lambda v: abs(v) <= 100.0, "-100 to 100 (0: off)"),
    ("seed", lambda v: 0 <= v < 1 << 64, "0 to 2^64 - 1"),
    ("nonce", lambda v: 0 <= v < 1 << 64, "0 to 2^64 - 1"),
    (
        "logit_bias",
        _is_bias,
        f"at most {MOST_BIASES} different token ids, with -100 to 100 each",
    ),
    ("min_tokens", lambda v: v >= 0, "0 or more"),
    ("logprobs", lambda v: v is None or 0 <= v <= MOST_LIKELY, f"0 to {MOST_LIKELY}"),
)


#: The most likely token each time.
GREEDY = SamplingSettings(temperature=0.0)


def sample(
    logits: Logits,
    settings: SamplingSettings,
    position: int,
    previous: Sequence[int] = (),
    *,
    answer_at: int = 0,
    end_ids: Iterable[int] = (),
    mask: Words | None = None,
) -> int:
    """The next token id.

    `logits` (n_vocab,) f32; `position` is the place of the token in the sequence: the random number
    depends on it, the seed and the nonce alone, so that a sequence can be repeated from anywhere;
    `previous` are the tokens before it, those of the answer from `answer_at` on, which the
    `end_ids` would end; `mask` has a bit for each token that is allowed. Raises ModelError for
    logits that are no distribution, and where no token is allowed.
    """
    words = settings.words(answer_at, end_ids)
    adjusted = reference.adjust(_checked(logits), words, np.asarray(previous, np.int64), mask)
    token = reference.sample(adjusted, words, position)
    if token == INVALID_TOKEN:
        raise ModelError("no token is allowed: mask and biases leave none")
    return token


def distribution(
    logits: Logits, settings: SamplingSettings, previous: Sequence[int] = ()
) -> tuple[Ids, NDArray[np.float64]]:
    """What `sample` draws from: ids (n,), most likely first, and their probabilities (n,) f64."""
    words = settings.words()
    adjusted = reference.adjust(_checked(logits), words, np.asarray(previous, np.int64))
    return reference.distribution(adjusted, words)


def uniform(seed: int, position: int, nonce: int = 0) -> float:
    """A random number in [0, 1), a function of (seed, nonce, position) alone."""
    return reference.uniform(seed, nonce, position)


def _checked(logits: Logits) -> Logits:
    highest = logits.max()
    if not np.isfinite(highest):  # NaN spreads into the maximum
        raise ModelError(f"the highest logit is {highest}: the forward pass went wrong")
    return logits
