"""Sampling: the settings record on the device, and the numpy reference.

The order is llama.cpp's: logit bias, repetition penalty, presence and frequency penalty, masks,
top-k, top-p, min-p, temperature, draw. Each filter works on the distribution left by the previous
one, and the temperature does not affect what top-p and min-p keep. Logits are adjusted in f32 here
as on the device, and thresholds are rounded to it, so that both keep the same tokens; probabilities
are f64 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.sampling_limits import (
    INVALID_TOKEN,
    MOST_BIASES,
    MOST_END_IDS,
    MOST_LIKELY,
)

Logits = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Ids = npt.NDArray[np.int64]

_HIGHEST = float(np.finfo(np.float32).max)
_LOWEST_PENALTY = float(np.finfo(np.float32).tiny)
_WORD = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Part:
    """A field of the record, computed from a ``setting``, by default ``unset``.

    ``examples`` are values for the kernels' examples.
    """

    name: str
    kind: npt.DTypeLike
    setting: str
    unset: Any
    pack: Callable[[Any], Any] = lambda value: value
    examples: tuple[float, ...] = ()


def _padded(values: Iterable[float], length: int) -> list[float]:
    """``values`` padded with zeros to ``length``."""
    found = list(values)
    return found + [0] * (length - len(found))


def _within(value: float, low: float, high: float) -> float:
    """The value, or the nearest of these bounds."""
    return min(max(value, low), high)


def _up_to_word(value: int) -> int:
    """The value, at most the maximum of a 32-bit word."""
    return min(value, _WORD)


_F32, _U32, _U64 = np.float32, np.uint32, np.uint64
_BIAS_KIND, _ID_KIND = (_F32, MOST_BIASES), (_U32, MOST_BIASES)
#: The settings of one sequence in device memory. Kernels read groups of four words at once: each
#: starts at a multiple of 16 bytes, and so does every record.
RECORD: tuple[Part, ...] = (
    # 0 or less: greedy
    Part("temperature", _F32, "temperature", 0.0, lambda t: _within(t, -_HIGHEST, _HIGHEST),
         (0.0, 0.3, 0.8, 1.0, 1.7)),
    # 0: off
    Part("top_k", _U32, "top_k", 0, _up_to_word, (0, 1, 5, 40, 700, 1500)),
    # 1 or more: off
    Part("top_p", _F32, "top_p", 1.0, examples=(0.2, 0.9, 0.95, 1.0)),
    # natural logarithm; -inf: off
    Part("log_min_p", _F32, "min_p", 0.0, lambda p: math.log(p) if p > 0.0 else -math.inf,
         (0.0, 0.01, 0.05, 0.3)),
    # 1: off
    Part("repeat_penalty", _F32, "repeat_penalty", 1.0,
         lambda p: _within(p, _LOWEST_PENALTY, _HIGHEST), (0.8, 1.0, 1.1, 1.5)),
    # 0: off; 2^32 - 1: the whole history
    Part("repeat_last_n", _U32, "repeat_last_n", 0, lambda n: _WORD if n < 0 else _up_to_word(n),
         (-1, 0, 3, 64)),
    # 0: off
    Part("presence_penalty", _F32, "presence_penalty", 0.0, examples=(0.0, 0.5, -1.2)),
    # 0: off
    Part("frequency_penalty", _F32, "frequency_penalty", 0.0, examples=(0.0, 0.3, -0.1)),
    Part("seed", _U64, "seed", 0),
    # distinguishes requests with the same seed
    Part("nonce", _U64, "nonce", 0, examples=(0, 1, 2)),
    # index of the first generated token
    Part("answer_at", _U32, "answer_at", 0),
    # minimum number of them before an end id
    Part("min_tokens", _U32, "min_tokens", 0, _up_to_word),
    Part("end_count", _U32, "end_ids", (), len),
    Part("bias_count", _U32, "logit_bias", (), len),
    # 0: none; else 1 + the number of likely tokens
    Part("logprobs", _U32, "logprobs", None, lambda n: 0 if n is None else 1 + n),
    Part("reserved", (_U32, 3), "reserved", 0),
    Part("end_ids", (_U32, MOST_END_IDS), "end_ids", (), lambda ids: _padded(ids, MOST_END_IDS)),
    # distinct
    Part("bias_ids", _ID_KIND, "logit_bias", (), lambda of: _padded(dict(of), MOST_BIASES)),
    Part("biases", _BIAS_KIND, "logit_bias", (),
         lambda of: _padded(dict(of).values(), MOST_BIASES)),
)  # fmt: skip
SETTINGS = np.dtype([(part.name, part.kind) for part in RECORD])
SETTINGS_WORDS = SETTINGS.itemsize // 4
#: Byte offsets of its parts.
OFFSETS: Mapping[str, int] = {name: at[1] for name, at in (SETTINGS.fields or {}).items()}
#: Maximum number of entries of list settings.
_MOST = {"end_ids": MOST_END_IDS, "logit_bias": MOST_BIASES}
_UNSET = {part.setting: part.unset for part in RECORD}


def pack_settings(**given: Any) -> Words:
    """One sequence's row of the kernels' ``settings``, (SETTINGS_WORDS,) u32.

    Settings that are not ``given`` are off, or greedy: `RECORD` names the settings.
    ``repeat_last_n`` -1 uses the whole history. ``logit_bias`` is a mapping, or pairs, of token ids
    and numbers. ``logprobs`` is the number of likely tokens to report beside the chosen one, None:
    no report. Raises PtxgenError for an unknown setting, and for more than MOST_END_IDS end ids,
    MOST_BIASES biases or MOST_LIKELY likely tokens.
    """
    if unknown := given.keys() - _UNSET.keys():
        raise PtxgenError(f"sampling settings: no setting is called {', '.join(sorted(unknown))}")
    values = _UNSET | given
    for count, most, what in (
        *((len(values[name]), most, name.replace("_", " ")) for name, most in _MOST.items()),
        (values["logprobs"] or 0, MOST_LIKELY, "likely tokens"),
    ):
        if count > most:
            raise PtxgenError(f"sampling settings: {count} {what}, at most {most}")
    words: Words = _record(values, _OFF).view(np.uint32)
    return words


def for_answer(words: Words, seed: int, answer_at: int, end_ids: Sequence[int]) -> Words:
    """A copy of packed settings without end ids, with these of an answer, MOST_END_IDS at most."""
    copied = words.copy()
    record = copied.view(SETTINGS)
    record["seed"], record["answer_at"], record["end_count"] = seed, answer_at, len(end_ids)
    record["end_ids"][0, : len(end_ids)] = end_ids
    return copied


def _record(values: Mapping[str, Any], off: Any = None) -> Any:
    """A record of these settings; ``off`` is that of settings that are not given."""
    record = np.zeros(1, SETTINGS) if off is None else off.copy()
    for part in RECORD:
        if off is None or values[part.setting] is not part.unset:
            record[part.name] = part.pack(values[part.setting])
    return record


_OFF = _record(_UNSET)


def random_settings(rng: np.random.Generator, **given: Any) -> Words:
    """One sequence's settings: each with ``examples`` is one of them, and those that are
    ``given``."""
    drawn = {of.setting: rng.choice(of.examples).item() for of in RECORD if of.examples}
    drawn["seed"] = int(rng.integers(0, 2**64, dtype=np.uint64))
    return pack_settings(**drawn | given)


def unpack_settings(settings: Words) -> Any:
    """The record of one sequence, with a field for each setting."""
    return np.ascontiguousarray(settings).view(SETTINGS)[0]


def random_bits(seed: int, nonce: int, position: int) -> int:
    """64 random bits, a function of (seed, nonce, position) only.

    Philox4x64-10, a counter-based generator (Salmon et al. 2011), keyed by the seed; position and
    nonce are the low words of its counter.
    """
    counter = position + (nonce << 64)
    return int(np.random.Philox(key=seed, counter=counter).random_raw())


def uniform(seed: int, nonce: int, position: int) -> float:
    """A random number in [0, 1): the highest 53 of the ``random_bits``."""
    return (random_bits(seed, nonce, position) >> 11) * 2.0**-53


def adjust(
    logits: Logits, settings: Words, history: npt.ArrayLike, mask: Words | None = None
) -> Logits:
    """Logits after bias, penalties and masks, (n_vocab,) f32.

    ``history`` are the tokens before the one to choose; those from ``answer_at`` on were generated.
    ``mask`` (ceil(n_vocab / 32),) u32 has a bit per token, the lowest first: 1 if allowed. Without
    a mask, end ids are forbidden before ``min_tokens``; a mask decides alone. Tokens outside the
    vocabulary are ignored.
    """
    choice, n_vocab = unpack_settings(settings), len(logits)
    tokens = np.asarray(history, np.int64)
    generated = tokens[int(choice["answer_at"]) :]
    adjusted = np.array(logits, np.float32)
    count = int(choice["bias_count"])
    known = choice["bias_ids"][:count] < n_vocab
    adjusted[choice["bias_ids"][:count][known]] += choice["biases"][:count][known]
    with np.errstate(over="ignore"):
        _penalise_repeated(adjusted, choice, tokens)
        _penalise_generated(adjusted, choice, generated)
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:n_vocab]
        adjusted[allowed == 0] = -np.inf
    elif len(generated) < choice["min_tokens"]:
        ends = choice["end_ids"][: int(choice["end_count"])]
        adjusted[ends[ends < n_vocab]] = -np.inf
    return adjusted


def _penalise_repeated(logits: Logits, choice: Any, tokens: Ids) -> None:
    """Penalise recent tokens (Keskar et al. 2019; negative logits as llama.cpp)."""
    seen = np.unique(tokens[max(0, len(tokens) - int(choice["repeat_last_n"])) :])
    seen = seen[seen < len(logits)]
    values, factor = logits[seen], choice["repeat_penalty"]
    logits[seen] = np.where(values > 0, values / factor, values * factor)


def _penalise_generated(logits: Logits, choice: Any, generated: Ids) -> None:
    """Subtract frequency penalty * count + presence penalty, as OpenAI's API defines them."""
    seen, counts = np.unique(generated[generated < len(logits)], return_counts=True)
    each = counts.astype(np.float32) * choice["frequency_penalty"]
    logits[seen] -= each + choice["presence_penalty"]


def sample(logits: Logits, settings: Words, position: int) -> int:
    """The next token id, or INVALID_TOKEN.

    ``logits`` (n_vocab,) f32, adjusted (`adjust`); ``settings`` as `pack_settings` makes them;
    ``position`` is the place in the sequence of the token to draw.
    """
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return INVALID_TOKEN
    choice = unpack_settings(settings)
    ids, probabilities = distribution(logits, settings)
    cumulative = np.cumsum(probabilities)
    drawn = uniform(int(choice["seed"]), int(choice["nonce"]), position) * cumulative[-1]
    drawn = min(drawn, np.nextafter(cumulative[-1], 0.0))  # rounding must not exceed the end
    return int(ids[np.searchsorted(cumulative, drawn, side="right")])


def distribution(logits: Logits, settings: Words) -> tuple[Ids, npt.NDArray[np.float64]]:
    """The distribution of `sample`: ids (n,), most likely first, and their probabilities (n,) f64.

    ``logits`` without NaN, the highest one finite. One id if the temperature is 0 or less.
    """
    choice = unpack_settings(settings)
    if choice["temperature"] <= 0.0:
        return np.array([np.argmax(logits)], np.int64), np.ones(1)  # the lowest index of equals
    ids = _top_k(logits, int(choice["top_k"]))
    kept = logits[ids]
    kept = kept[: _top_p_count(kept, float(choice["top_p"]))]
    kept = kept[kept >= kept[0] + choice["log_min_p"]]  # p >= min_p * highest p, both in f32
    return ids[: len(kept)], _softmax(kept, float(choice["temperature"]))


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """ln softmax(logits), (n_vocab,) f64: OpenAI's logprobs, of the model's own logits, before
    adjustments and at temperature 1."""
    values = logits.astype(np.float64)
    values -= values.max()
    return np.asarray(values - np.log(np.exp(values).sum()))


def most_likely(logits: Logits, count: int) -> Ids:
    """Ids of the ``count`` highest logits, highest first, the lowest id first among equals."""
    return _top_k(logits, count) if count else np.zeros(0, np.int64)


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
    """Number of sorted candidates needed to reach the probability ``top_p``; at least one."""
    if top_p >= 1.0:
        return len(logits)
    return min(int(np.searchsorted(np.cumsum(_softmax(logits)), top_p)) + 1, len(logits))


def _softmax(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    weights: npt.NDArray[np.float64] = np.exp((values - values.max()) / temperature)
    weights /= weights.sum()
    return weights
