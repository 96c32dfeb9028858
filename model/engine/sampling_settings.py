"""How a sequence's tokens are chosen: what may be set, within which bounds, and the defaults.

The library, the commands and the server read all of it here. numpy is not imported.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from urdir.model.errors import SettingsError
from urdir.ptxgen.kernels.sampling_limits import (
    INVALID_TOKEN,
    MOST_BIASES,
    MOST_END_IDS,
    MOST_LIKELY,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]


class Bounds(NamedTuple):
    """The least and the most that a number may be, in words as well; ``is_whole`` where fractions
    are refused."""

    low: float
    high: float
    words: str
    is_whole: bool = False

    def allow(self, value: Any) -> bool:
        """Whether a value is such a number."""
        kind = Integral if self.is_whole else Real
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high


#: The most that counts and seeds may be.
MOST_COUNT = 1 << 31
MOST_SEED = (1 << 64) - 1
_COUNT = "0 (off) or more"
_PENALTY = Bounds(-100, 100, "-100 to 100 (0: off)")
_BIAS = Bounds(-100, 100, "-100 to 100")
_SEED = Bounds(0, MOST_SEED, "0 to 2^64 - 1", is_whole=True)
#: Of the settings that are numbers.
BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, 100, "0 (greedy) to 100"),
    "top_k": Bounds(0, MOST_COUNT, _COUNT, is_whole=True),
    "top_p": Bounds(0, 1, "0 to 1 (off)"),
    "min_p": Bounds(0, 1, "0 (off) to 1"),
    "repeat_penalty": Bounds(1e-3, 100, "0.001 to 100 (1: off)"),
    "repeat_last_n": Bounds(-1, MOST_COUNT, "-1 (all), 0 (off) or more", is_whole=True),
    "seed": _SEED,
    "nonce": _SEED,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_tokens": Bounds(0, MOST_COUNT, _COUNT, is_whole=True),
    "logprobs": Bounds(0, MOST_LIKELY, f"0 to {MOST_LIKELY}", is_whole=True),
}
_MAY_BE_NONE = ("seed", "logprobs")


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose; SettingsError names the field and the value that is out of range.

    The repetition penalty is llama.cpp's: it divides logits of tokens among the last
    ``repeat_last_n``, the prompt's too. Presence and frequency penalty are OpenAI's: they count the
    tokens of the answer alone, and subtract from their logits. ``seed`` and ``nonce`` decide the
    random numbers, whatever place in the cache a sequence has: answers that share a seed and are to
    differ take different nonces. Without a seed every answer draws a new one.
    """

    temperature: float = 0.8  # 0: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens that the penalty looks back; -1: all
    seed: int | None = None  # None: a new one for each answer
    nonce: int = 0
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    min_tokens: int = 0  # of the answer, before an end id may come
    logprobs: int | None = None  # likely tokens reported beside the chosen one; None: nothing

    def __post_init__(self) -> None:
        for field, bounds in BOUNDS.items():
            value = getattr(self, field)
            if not (value is None and field in _MAY_BE_NONE) and not bounds.allow(value):
                raise SettingsError(f"{field} is {value!r}: expected {bounds.words}")
        if not _are_biases(self.logit_bias):
            raise SettingsError(
                f"logit_bias is {self.logit_bias!r:.80}: expected a tuple of at most "
                f"{MOST_BIASES} pairs: different token ids, with {_BIAS.words} each"
            )

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, of logits as they are."""
        return self.temperature == 0 and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """True if logits are changed before a token is chosen."""
        repeats = self.repeat_penalty != 1.0 and self.repeat_last_n != 0
        penalises = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return repeats or penalises or bool(self.logit_bias) or self.min_tokens > 0

    def with_seed(self) -> Self:
        """The same settings with their seed, or a new one of 32 bits, which is short to type."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def words(self, answer_at: int = 0, end_ids: Iterable[int] = ()) -> Words:
        """The settings as the kernels read them, (SETTINGS_WORDS,) u32; a seed is drawn for them
        where none is set.

        The answer begins at ``answer_at``; of its ``end_ids`` the device gets the lowest
        MOST_END_IDS.
        """
        from urdir.ptxgen.kernels.sampling import pack_settings

        return pack_settings(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            seed=self.with_seed().seed or 0,
            nonce=self.nonce,
            logprobs=self.logprobs,
            answer_at=answer_at,
            min_tokens=self.min_tokens,
            end_ids=sorted(end_ids)[:MOST_END_IDS],
        )


def _are_biases(pairs: Any) -> bool:
    """Whether they are tuples of different token ids and numbers within bounds."""
    if not isinstance(pairs, tuple) or len(pairs) > MOST_BIASES:
        return False
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    ids = Bounds(0, INVALID_TOKEN - 1, "", is_whole=True)
    are_good = all(ids.allow(token) and _BIAS.allow(bias) for token, bias in pairs)
    return are_good and len(dict(pairs)) == len(pairs)


#: What holds unless it is set: llama.cpp's.
DEFAULTS = SamplingSettings()
#: The most likely token at every step.
GREEDY = SamplingSettings(temperature=0.0)
#: OpenAI's: the distribution as it is.
OPENAI = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
