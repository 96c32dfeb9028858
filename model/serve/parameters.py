"""What completions and chats have in common: sampling, length, stops, and how the answer comes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import MOST_COUNT, MOST_SEED, SETTINGS, SamplingSettings
from urdir.model.serve.errors import unknown_model
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.prefix_scope import prefix_scope
from urdir.model.text.constraints import Constraint
from urdir.model.text.thought_limit import ThoughtLimit

MOST_LOGPROBS = 20
_MOST_BIAS = 100
#: Adapters of a request at most.
MOST_ADAPTERS = 64


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
    drafts: bool
    draft_p_min: float | None
    adapters: tuple[tuple[str, float], ...] | None
    thinking: int | None  # tokens of reasoning; None: no limit
    prompt_logprobs: int | None = None  # of the prompts' tokens, and of this many likely ones

    def requests(
        self,
        prompt: tuple[int, ...],
        caller: bytes,
        constraint: Constraint | None = None,
        shown: frozenset[str] = frozenset(),
        thoughts: ThoughtLimit | None = None,
    ) -> list[Request]:
        """One for each of the ``n`` answers, all of one seed; ``caller`` is the digest of a key
        (`prefix_scope`)."""
        settings = self.settings.with_seed()
        return [
            Request(
                prompt=prompt,
                settings=replace(settings, nonce=index) if index != settings.nonce else settings,
                limit=self.limit,
                stops=self.stops,
                ignore_end=self.ignore_end,
                constraint=constraint,
                thoughts=thoughts,
                shown=shown,
                scope=prefix_scope(caller, self.salt),
                drafts=self.drafts,
                draft_p_min=self.draft_p_min,
                adapters=self.adapters,
                prompt_logprobs=self.prompt_logprobs,
            )
            for index in range(self.n)
        ]


def read_parameters(
    fields: Fields, model: ServedModel, limits: Limits, limit: int | None, logprobs: int | None
) -> Parameters:
    """The parameters in ``fields``; ``limit`` and ``logprobs`` differ between the endpoints.

    Raises ApiError for a field that is out of range, or for another model than the one served.
    """
    adapters = _read_adapters(fields, model)
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        fields.fail("stream_options", "needs 'stream': true")
    settings = _read_settings(fields, model, limits, logprobs)
    if limit is not None and settings.min_tokens > limit:
        fields.fail("min_tokens", f"is more than the {limit} tokens that the answer may have")
    return Parameters(
        settings=settings,
        limit=limit,
        stops=fields.texts("stop", limits.stops),
        ignore_end=fields.flag("ignore_eos"),
        n=_read_count(fields, limits),
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        salt=_read_salt(fields, limits),
        drafts=fields.whole("speculative.n_max", 0) != 0,
        draft_p_min=fields.number("speculative.p_min", 0, 1),
        adapters=adapters,
        thinking=_read_thinking(fields, model),
    )


#: Names of the limit of reasoning: this server's, llama-server's, vLLM's.
THINKING_FIELDS = ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget")


def _read_thinking(fields: Fields, model: ServedModel) -> int | None:
    """How many tokens of reasoning there may be; -1: no limit."""
    for name in THINKING_FIELDS:
        value = fields.whole(name, -1, MOST_COUNT)
        if value is not None:
            return None if value < 0 else value
    return model.defaults.thinking


def _read_count(fields: Fields, limits: Limits) -> int:
    """How many answers each prompt gets: n, or llama-server's n_cmpl."""
    n, n_cmpl = (fields.whole(name, 1, limits.answers) for name in ("n", "n_cmpl"))
    count = n or n_cmpl or 1
    if fields.whole("best_of", 1) not in (None, count):
        fields.fail("best_of", "must be 'n': ask for more answers and choose")
    return count


def _read_adapters(fields: Fields, model: ServedModel) -> tuple[tuple[str, float], ...] | None:
    """The adapters of a request: that of the name in ``model``, or llama-server's ``lora``, of
    which those that are not listed have the scale 0; None: the server's own."""
    asked, known = fields.text("model"), dict(model.adapters)
    check_model(asked, model)
    scales = read_scales(fields, "lora", len(known))
    if asked in known and asked not in model.names:
        if scales is not None:
            fields.fail("lora", f"is for the model, and 'model' is the adapter {asked!r}")
        return ((asked, known[asked]),)
    if scales is None:
        return None
    names = [*known]
    return tuple((names[place], scale) for place, scale in scales.items())


def read_scales(fields: Fields, name: str, count: int) -> dict[int, float] | None:
    """Scales of ``count`` adapters by number: a list of {"id", "scale"}."""
    if fields.raw(name) is None:
        return None
    found, items = {}, fields.objects(name, most=MOST_ADAPTERS)
    if items and not count:
        fields.fail(name, "is for LoRA adapters: this server has none", "invalid_value")
    for item in items:
        place, scale = item.whole("id", 0, count - 1), item.number("scale", -1e4, 1e4)
        if place is None or scale is None:
            item.fail("id" if place is None else "scale", "is missing")
        found[place] = scale
    return found


def check_model(asked: str | None, model: ServedModel) -> None:
    """Raise ApiError for another model than the served one and its adapters."""
    names = names_of(model)
    if asked is not None and asked not in names:
        raise unknown_model(asked, names)


def names_of(model: ServedModel) -> tuple[str, ...]:
    """All names that a request may have as its model: the model's, and those of its adapters."""
    return (*model.names, *(name for name, _ in model.adapters if name not in model.names))


def _read_settings(
    fields: Fields, model: ServedModel, limits: Limits, logprobs: int | None
) -> SamplingSettings:
    """The settings that the fields ask for, by the table of all of them, or the server's own."""
    asked = {
        name: _read_setting(fields, model, limits, name)
        for name, setting in SETTINGS.items()
        if setting.field_of
    }
    given = {name: value for name, value in asked.items() if value is not None}
    repetition = _read_number(fields, "repeat_penalty", "repetition_penalty")
    if repetition is not None:  # vLLM's, which looks back on all tokens
        given = {"repeat_last_n": -1} | given | {"repeat_penalty": repetition}
    return replace(model.defaults.settings, **given, logprobs=logprobs)


def _read_setting(fields: Fields, model: ServedModel, limits: Limits, name: str) -> Any:
    """What a field says of the setting of its name; None where it is not given."""
    if name == "logit_bias":
        return _read_bias(fields, model, limits)
    if name == "seed":  # negative ones count from the end, as others take them
        seed = fields.whole(name, -(1 << 63), MOST_SEED)
        return None if seed is None else seed % (MOST_SEED + 1)
    if name == "top_k":  # -1 is off, too
        top_k = fields.whole(name, -1, MOST_COUNT)
        return None if top_k is None else max(top_k, 0)
    return _read_number(fields, name, name)


def _read_number(fields: Fields, setting: str, name: str) -> float | None:
    """A field with the bounds of a setting."""
    bounds = SETTINGS[setting].bounds
    assert bounds is not None
    if bounds.is_whole:
        return fields.whole(name, int(bounds.low), int(bounds.high))
    return fields.number(name, bounds.low, bounds.high)


def _read_salt(fields: Fields, limits: Limits) -> str | None:
    """vLLM's: requests with other salts find nothing of this one's prompt."""
    salt = fields.text("cache_salt")
    if salt is not None and not 0 < len(salt) <= limits.salt:
        fields.fail("cache_salt", f"must have 1 to {limits.salt} characters", "invalid_value")
    return salt


def _read_bias(
    fields: Fields, model: ServedModel, limits: Limits
) -> tuple[tuple[int, float], ...] | None:
    """{"token id": what is added to its logit}, as pairs; None where it is not there, or is an
    empty list, which llama-server's clients send for none."""
    value = fields.raw("logit_bias")
    if value == []:
        return None
    is_listed = isinstance(value, list)
    if is_listed and len(value) > limits.biases:
        fields.fail("logit_bias", f"has more than {limits.biases} pairs")
    biases = _listed_biases(fields, model, limits) if is_listed else fields.object("logit_bias")
    if biases is None:
        return None
    if len(biases.values) > limits.biases:
        fields.fail("logit_bias", f"has more than {limits.biases} tokens")
    pairs = []
    for key in biases.values:
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        is_id = is_id and int(key) < model.tokenizer.vocab_size
        value = biases.number(key, -_MOST_BIAS, _MOST_BIAS)
        if not is_id or value is None:
            fields.fail("logit_bias", "must map token ids of the vocabulary to numbers")
        pairs.append((int(key), value))
    return tuple(pairs)


def _listed_biases(fields: Fields, model: ServedModel, limits: Limits) -> Fields:
    """llama-server's list of [id, bias] as an object, where the last one of a token counts; false
    is the bias of one that never comes. A text in place of the id stands for all of its tokens."""
    found: dict[str, Any] = {}
    for pair in fields.raw("logit_bias"):
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (int, str):
            fields.fail("logit_bias", "must have pairs of a token id and a number", "invalid_type")
        given, bias = pair
        if isinstance(given, str) and not 0 < len(given) <= limits.salt:
            fields.fail("logit_bias", f"has a text without 1 to {limits.salt} characters")
        ids = model.tokenizer.encode(given) if isinstance(given, str) else [given]
        found |= dict.fromkeys(map(str, ids), -_MOST_BIAS if bias is False else bias)
    return Fields(found, "logit_bias.")


def read_limit(fields: Fields, model: ServedModel, *names: str, least: int = 1) -> int | None:
    """The most tokens of an answer, by the first of the names that is given, or the server's.

    -1 means no limit, as in llama.cpp, and so does -2, "until the context is full". With a
    ``least`` of 0 there may be no answer: the prompt is computed, and kept.
    """
    for name in names:
        value = fields.whole(name, -2)
        if value == 0 < least:
            fields.fail(name, "must be at least 1", "invalid_value")
        if value is not None:
            return None if value < 0 else min(value, MOST_COUNT)
    return model.defaults.limit
