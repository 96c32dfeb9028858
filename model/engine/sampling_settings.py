"""How a sequence's tokens are chosen: one table of what may be set.

The library, the commands and the server read it. numpy is not imported.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from operator import attrgetter
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
        is_number = type(value) is int or (type(value) is float and not self.is_whole)
        if not is_number:  # of other classes, such as numpy's
            kind = Integral if self.is_whole else Real
            is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Setting:
    """What the library, the commands, the server and the documents know of a setting.

    ``bounds`` of a number (others are checked by themselves), what it ``does``, and the value that
    is ``off`` (None: the default). ``flags`` are llama.cpp's names, with blanks between them;
    ``has_variable`` where llama.cpp documents an environment variable for them. ``field_of`` says
    who has a field of that name in requests: O (OpenAI), V (vLLM), L (llama-server).
    """

    bounds: Bounds | None
    does: str
    off: float | None = None
    flags: str = ""
    has_variable: bool = False
    field_of: str = ""


def _setting(default: Any, bounds: Bounds | None, does: str, **more: Any) -> Any:
    """A field of `SamplingSettings`, with its row of `SETTINGS`."""
    return field(default=default, metadata={"setting": Setting(bounds, does, **more)})


#: The most that counts and seeds may be.
MOST_COUNT = 1 << 31
MOST_SEED = (1 << 64) - 1
_COUNT = Bounds(0, MOST_COUNT, "0 (off) or more", is_whole=True)
_PENALTY = Bounds(-100, 100, "-100 to 100 (0: off)")
_BIAS = Bounds(-100, 100, "-100 to 100")
_SEED = Bounds(0, MOST_SEED, "0 to 2^64 - 1", is_whole=True)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose; SettingsError names the field and the value that is out of range.

    The repetition penalty is llama.cpp's: it divides logits of tokens among the last
    ``repeat_last_n``, the prompt's too. Presence and frequency penalty are OpenAI's: they count the
    tokens of the answer alone, and subtract from their logits. ``logit_bias`` are pairs of token
    ids and what is added to their logits. ``seed`` and ``nonce`` decide the random numbers,
    whatever place in the cache a sequence has: answers that share a seed and are to differ take
    different nonces. Without a seed every answer draws a new one.

    A new setting is a row here, the last, and a part of the device's record with its reference
    (`urdir.ptxgen.kernels.sampling`) and its template: flags, fields of requests, bounds and the
    tables of documents follow.
    """

    # fmt: off
    temperature: float = _setting(
        0.8, Bounds(0, 100, "0 (greedy) to 100"), "temperature; 0 is greedy",
        off=1.0, flags="--temp --temperature", has_variable=True, field_of="OVL",
    )
    top_k: int = _setting(
        40, _COUNT, "keep the K likeliest; 0 keeps all",
        off=0, flags="--top-k", has_variable=True, field_of="VL",
    )
    top_p: float = _setting(
        0.95, Bounds(0, 1, "0 to 1 (off)"), "share of probability kept; 1 keeps all",
        off=1.0, flags="--top-p", has_variable=True, field_of="OVL",
    )
    min_p: float = _setting(
        0.05, Bounds(0, 1, "0 (off) to 1"), "drop less than this of the best; 0 drops none",
        off=0.0, flags="--min-p", has_variable=True, field_of="VL",
    )
    repeat_penalty: float = _setting(
        1.0, Bounds(1e-3, 100, "0.001 to 100 (1: off)"),
        "divide logits of repeated tokens; 1 is off",
        flags="--repeat-penalty", has_variable=True, field_of="L",
    )
    repeat_last_n: int = _setting(
        64, Bounds(-1, MOST_COUNT, "-1 (all), 0 (off) or more", is_whole=True),
        "tokens that --repeat-penalty looks back on, also the prompt's; -1: all",
        flags="--repeat-last-n", field_of="L",
    )
    seed: int | None = _setting(
        None, _SEED, "random seed; without one each answer has a new one",
        flags="-s --seed", field_of="OVL",
    )
    nonce: int = _setting(0, _SEED, "sets answers of one seed apart")
    presence_penalty: float = _setting(
        0.0, _PENALTY,
        "subtract from logits of tokens that the answer has: OpenAI's, the prompt does not count; "
        "0 is off",
        flags="--presence-penalty", has_variable=True, field_of="OVL",
    )
    frequency_penalty: float = _setting(
        0.0, _PENALTY, "the same for each time that the answer has them; 0 is off",
        flags="--frequency-penalty", has_variable=True, field_of="OVL",
    )
    logit_bias: tuple[tuple[int, float], ...] = _setting(
        (), None, f"add to logits of tokens, {MOST_BIASES} at most",
        flags="-l --logit-bias", field_of="OVL",
    )
    min_tokens: int = _setting(0, _COUNT, "tokens before the end may come", field_of="VL")
    logprobs: int | None = _setting(
        None, Bounds(0, MOST_LIKELY, f"0 to {MOST_LIKELY}", is_whole=True),
        "likely tokens reported beside the chosen one",
    )
    # fmt: on

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            value, bounds = getattr(self, name), setting.bounds
            if value is _DEFAULT_OF[name]:  # most are: a request makes such settings three times
                continue
            if bounds is not None and not bounds.allow(value):
                raise SettingsError(f"{name} is {value!r}: expected {bounds.words}")
        if not _are_biases(self.logit_bias):
            raise SettingsError(
                f"logit_bias is {self.logit_bias!r:.80}: expected a tuple of at most "
                f"{MOST_BIASES} pairs: different token ids, with {_BIAS.words} each"
            )

    def of_file(self, metadata: Mapping[str, Any]) -> Self:
        """These settings with those that the model's file recommends (general.sampling.*, which a
        folder's generation_config.json becomes). Values out of range are ignored, as a file must
        not stop a model."""
        found: dict[str, Any] = {}
        for key, name in _RECOMMENDED.items():
            value, bounds = metadata.get(f"general.sampling.{key}"), SETTINGS[name].bounds
            if value is not None and bounds is not None and bounds.allow(value):
                found[name] = value
        return replace(self, **found)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, of unchanged logits."""
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
        from urdir.ptxgen.kernels.sampling import for_answer

        seed = secrets.randbits(32) if self.seed is None else self.seed
        ends = sorted(end_ids)[:MOST_END_IDS]
        return for_answer(_packed(_values_of(self)), seed, answer_at, ends)


@lru_cache(maxsize=256)
def _packed(values: tuple[Any, ...]) -> Words:
    """Settings without their seed as the kernels read them: most requests have the same ones."""
    from urdir.ptxgen.kernels.sampling import pack_settings

    return pack_settings(**dict(zip(_SEEDLESS, values, strict=True)))


def _are_biases(pairs: Any) -> bool:
    """Whether they are tuples of different token ids and numbers within bounds."""
    if not isinstance(pairs, tuple) or len(pairs) > MOST_BIASES:
        return False
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    ids = Bounds(0, INVALID_TOKEN - 1, "", is_whole=True)
    are_good = all(ids.allow(token) and _BIAS.allow(bias) for token, bias in pairs)
    return are_good and len(dict(pairs)) == len(pairs)


#: Settings that files recommend, by their keys.
_RECOMMENDED = {
    "temp": "temperature",
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}
_DEFAULT_OF = {each.name: each.default for each in fields(SamplingSettings)}
#: The table: a row for each field of `SamplingSettings`, by its name.
SETTINGS: Mapping[str, Setting] = {
    each.name: each.metadata["setting"] for each in fields(SamplingSettings)
}
_SEEDLESS = [name for name in SETTINGS if name != "seed"]
_values_of = attrgetter(*_SEEDLESS)
_OFF: dict[str, Any] = {name: of.off for name, of in SETTINGS.items() if of.off is not None}
#: What holds unless it is set: llama.cpp's.
DEFAULTS = SamplingSettings()
#: The most likely token at every step.
GREEDY = SamplingSettings(temperature=0.0)
#: OpenAI's: the distribution as it is.
OPENAI = replace(DEFAULTS, **_OFF)
