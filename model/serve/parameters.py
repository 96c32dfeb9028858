"""What completions and chats have in common: sampling, length, stops, and how the answer comes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling import SamplingSettings
from urdir.model.serve.errors import unknown_model
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.text.constraints import Constraint

MOST_LOGPROBS = 20
_SEEDS = 1 << 64


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

    def requests(
        self,
        prompt: tuple[int, ...],
        constraint: Constraint | None = None,
        shown: frozenset[str] = frozenset(),
    ) -> list[Request]:
        """One for each of the ``n`` answers."""
        return [
            Request(
                prompt=prompt,
                settings=replace(self.settings, nonce=index),
                limit=self.limit,
                stops=self.stops,
                ignore_end=self.ignore_end,
                constraint=constraint,
                shown=shown,
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
        n=_read_count(fields, limits),
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
    )


def _read_count(fields: Fields, limits: Limits) -> int:
    """How many answers each prompt gets: n, or llama-server's n_cmpl."""
    n, n_cmpl = (fields.whole(name, 1, limits.answers) for name in ("n", "n_cmpl"))
    count = n or n_cmpl or 1
    if fields.whole("best_of", 1) not in (None, count):
        fields.fail("best_of", "must be 'n': ask for more answers and choose")
    return count


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
    repeat, look_back = fields.number("repetition_penalty", 1e-3, 100), -1
    if repeat is None:
        repeat, look_back = fields.number("repeat_penalty", 1e-3, 100), defaults.repeat_last_n
    top_k = fields.whole("top_k", -1, 1 << 31)
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "repeat_penalty": repeat,
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "top_k": None if top_k is None else max(top_k, 0),
        "repeat_last_n": fields.whole("repeat_last_n", -1, 1 << 31),
        "logit_bias": _read_bias(fields, model, limits),
        "seed": _read_seed(fields, model),
    }
    asked = {name: value for name, value in given.items() if value is not None}
    return replace(defaults, **{"repeat_last_n": look_back} | asked, logprobs=logprobs)


def _read_seed(fields: Fields, model: ServedModel) -> int | None:
    """A new seed where neither the request nor the server has one."""
    seed = fields.whole("seed", -(1 << 63), _SEEDS - 1)
    if seed is None:
        return None if model.defaults.has_seed else int.from_bytes(os.urandom(8))
    return seed % _SEEDS


def _read_bias(
    fields: Fields, model: ServedModel, limits: Limits
) -> tuple[tuple[int, float], ...] | None:
    """{"token id": what is added to its logit}, as pairs; None where it is not there."""
    biases = None if fields.raw("logit_bias") == [] else fields.object("logit_bias")
    if biases is None:  # llama-server's clients send an empty list for none
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
