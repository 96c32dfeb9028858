"""What completions and chats have in common: sampling, length, stops, and how the answer comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import BOUNDS, MOST_COUNT, MOST_SEED, SamplingSettings
from urdir.model.serve.errors import unknown_model
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.prefix_scope import prefix_scope
from urdir.model.text.constraints import Constraint

MOST_LOGPROBS = 20
#: Fields that would change the answer, and why they are refused and not ignored.
_UNSUPPORTED = {
    "use_beam_search": "answers are sampled",
    "prompt_logprobs": "only tokens of the answer have log-probabilities",
    "prompt_embeds": "prompts are text or token ids",
    "logits_processors": "name what you need as logit_bias or response_format",
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a request wants its answers."""

    settings: SamplingSettings
    limit: int | None
    stops: tuple[str, ...]
    ignore_end: bool
    n: int
    stream: bool
    include_usage: bool
    salt: str | None

    def requests(
        self,
        prompt: tuple[int, ...],
        caller: bytes,
        constraint: Constraint | None = None,
        shown: frozenset[str] = frozenset(),
    ) -> list[Request]:
        """One for each of the ``n`` answers, all of one seed; ``caller`` is the digest of a key
        (`prefix_scope`)."""
        settings = self.settings.with_seed()
        return [
            Request(
                prompt=prompt,
                settings=replace(settings, nonce=index),
                limit=self.limit,
                stops=self.stops,
                ignore_end=self.ignore_end,
                constraint=constraint,
                shown=shown,
                scope=prefix_scope(caller, self.salt),
            )
            for index in range(self.n)
        ]


def read_parameters(
    fields: Fields, model: ServedModel, limits: Limits, limit: int | None, logprobs: int | None
) -> Parameters:
    """The parameters in ``fields``; ``limit`` and ``logprobs`` differ between the endpoints.

    Raises ApiError for a field that is out of range, or for another model than the one served.
    """
    _check_model(fields, model)
    fields.refuse(_UNSUPPORTED)
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        fields.fail("stream_options", "needs 'stream': true")
    min_tokens = fields.whole("min_tokens", 0) or 0
    if limit is not None and min_tokens > limit:
        fields.fail("min_tokens", f"is more than the {limit} tokens that the answer may have")
    return Parameters(
        settings=replace(_read_settings(fields, model, limits, logprobs), min_tokens=min_tokens),
        limit=limit,
        stops=fields.texts("stop", limits.stops),
        ignore_end=fields.flag("ignore_eos"),
        n=fields.whole("n", 1, limits.answers) or 1,
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        salt=_read_salt(fields, limits),
    )


def _check_model(fields: Fields, model: ServedModel) -> None:
    asked = fields.text("model")
    if asked is not None and asked not in model.names:
        raise unknown_model(asked, model.names)


def _read_settings(
    fields: Fields, model: ServedModel, limits: Limits, logprobs: int | None
) -> SamplingSettings:
    """Names beyond OpenAI's are vLLM's and llama.cpp's; of the two names of the repetition penalty,
    vLLM's looks back on all tokens.
    """
    defaults = model.defaults.settings

    def number(setting: str, name: str | None = None) -> float | None:
        bounds = BOUNDS[setting]
        return fields.number(name or setting, bounds.low, bounds.high)

    repeat, look_back = number("repeat_penalty", "repetition_penalty"), -1
    if repeat is None:
        repeat, look_back = number("repeat_penalty"), defaults.repeat_last_n
    top_k = fields.whole("top_k", -1, MOST_COUNT)
    given: dict[str, Any] = {
        "temperature": number("temperature"),
        "top_p": number("top_p"),
        "min_p": number("min_p"),
        "repeat_penalty": repeat,
        "presence_penalty": number("presence_penalty"),
        "frequency_penalty": number("frequency_penalty"),
        "top_k": None if top_k is None else max(top_k, 0),
        "repeat_last_n": fields.whole("repeat_last_n", -1, MOST_COUNT),
        "logit_bias": _read_bias(fields, model, limits),
        "seed": _read_seed(fields),
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, **{"repeat_last_n": look_back} | asked, logprobs=logprobs)


def _read_seed(fields: Fields) -> int | None:
    """Negative ones count from the end, as others take them."""
    seed = fields.whole("seed", -(1 << 63), MOST_SEED)
    return None if seed is None else seed % (MOST_SEED + 1)


def _read_salt(fields: Fields, limits: Limits) -> str | None:
    """vLLM's: requests with other salts find nothing of this one's prompt."""
    salt = fields.text("cache_salt")
    if salt is not None and not 0 < len(salt) <= limits.salt:
        fields.fail("cache_salt", f"must have 1 to {limits.salt} characters", "invalid_value")
    return salt


def _read_bias(
    fields: Fields, model: ServedModel, limits: Limits
) -> tuple[tuple[int, float], ...] | None:
    """{"token id": what is added to its logit}, as pairs; None where it is not there."""
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    if len(biases.values) > limits.biases:
        fields.fail("logit_bias", f"has more than {limits.biases} tokens")
    pairs = []
    for key in biases.values:
        is_id = key.isdecimal() and len(key) < 10 and int(key) < model.tokenizer.vocab_size
        value = biases.number(key, -100, 100)
        if not is_id or value is None:
            fields.fail("logit_bias", "must map token ids of the vocabulary to numbers")
        pairs.append((int(key), value))
    return tuple(pairs)


def read_limit(fields: Fields, model: ServedModel, *names: str) -> int | None:
    """The most tokens of an answer, by the first of the names that is given, or the server's.

    -1, as llama.cpp has it, is no limit.
    """
    for name in names:
        value = fields.whole(name, -1)
        if value == 0:
            fields.fail(name, "must be at least 1", "invalid_value")
        if value is not None:
            return None if value < 0 else value
    return model.defaults.limit
