"""POST /v1/completions: continuation of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from urdir.model.engine.requests.request import Piece, TokenChoice
from urdir.model.serve.answer import Answer, Event, Kind, text_of
from urdir.model.serve.asked import Asked, Text
from urdir.model.serve.choices import ChoicesShape
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_format
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import ScoredPrompt, TextOffsets, text_logprobs
from urdir.model.serve.parameters import MOST_LOGPROBS, Parameters, read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import TEXT
from urdir.model.serve.tokens import check_tokens

DEFAULT_LIMIT = 16  # tokens, OpenAI's default
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")


def read_completion(fields: Fields, model: ServedModel, limits: Limits) -> Asked:
    """Read the request in ``fields``; ApiError if it is invalid."""
    refuse_unsupported(fields, TEXT)
    logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)
    echo, likely = fields.flag("echo"), fields.whole("prompt_logprobs", 0, MOST_LOGPROBS)
    limit: int | None = model.defaults.limit or DEFAULT_LIMIT
    if any(fields.raw(name) is not None for name in _LIMITS):
        limit = read_limit(fields, model, *_LIMITS, least=0)
    parameters = read_parameters(fields, model, limits, limit, logprobs)
    if likely is not None and parameters.stream:
        fields.fail("prompt_logprobs", "is for whole responses: use 'echo' with 'logprobs'")
    wanted = [each for each in (logprobs if echo else None, likely) if each is not None]
    # lm-eval leaves out the last log-probability, that of one more token, which may be an end
    keeps_end = parameters.ignore_end or (echo and logprobs is not None and limit == 1)
    parameters = replace(
        parameters, ignore_end=keeps_end, prompt_logprobs=max(wanted, default=None)
    )
    prompts = read_prompts(fields, model, limits.answers // parameters.n)
    special = fields.raw("add_special_tokens") is None or fields.flag("add_special_tokens")
    form = read_format(fields, limits)
    shape = partial(CompletionShape, echo=echo, likely=likely)
    return Asked(prompts, parameters, form, shape, echo, special)


def read_prompts(fields: Fields, model: ServedModel, most: int) -> tuple[Text, ...]:
    """The prompts, ``most`` of them at most; ApiError for other values."""
    given = _given_prompts(fields)
    if len(given) > most:
        fields.fail("prompt", f"has {len(given)} prompts, at most {most} are answered")
    return tuple(_read_prompt(prompt, model) for prompt in given)


def _given_prompts(fields: Fields) -> list[Any]:
    """The prompts as a list, given a text, token ids, or a list of either."""
    value = fields.raw("prompt")
    if value is None:
        fields.fail("prompt", "is missing")
    if not isinstance(value, str | list):
        fields.fail("prompt", "must be a text, token ids, or a list of these", "invalid_type")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return value
    return [value]


def _read_prompt(prompt: Any, model: ServedModel) -> Text:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        check_tokens(model, len(prompt))  # before checking each of them
    return Fields({"prompt": prompt}).token_ids("prompt", model.tokenizer.vocab_size)


class CompletionShape(ChoicesShape):
    """`text_completion` objects."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: ServedModel,
        parameters: Parameters,
        answers: Sequence[Answer],
        *,
        echo: bool = False,
        likely: int | None = None,
    ) -> None:
        """With ``echo`` texts begin with the prompts, with ``likely`` choices have vLLM's
        ``prompt_logprobs``, of this many likely tokens each."""
        super().__init__(model, parameters, answers)
        self.is_long = parameters.prompt_logprobs is not None
        self._echoes = echo and self.has_logprobs
        self._likely = likely
        self._prompts = [ScoredPrompt(model.tokenizer, answer.prompt) for answer in answers]
        self._offsets = [TextOffsets(model.tokenizer, len(answer.echo)) for answer in answers]

    def opening(self) -> list[Json]:
        """The prompts, if they are echoed without log-probabilities."""
        if self._echoes:
            return []
        return [self.chunk(each, {"text": each.echo}) for each in self.answers if each.echo]

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """A chunk, if there is anything new; before it, of an echoed prompt what is known."""
        chunks = super().part(answer, events, piece)
        prompt = self._prompts[answer.index]
        if not self._echoes or prompt.is_whole:
            return chunks
        begin = prompt.end
        logprobs = prompt.logprobs(piece.scores, self.parameters.settings.logprobs or 0)
        text = answer.echo[begin : None if prompt.is_whole else prompt.end]
        return [self.chunk(answer, {"text": text, "logprobs": logprobs}), *chunks]

    def delta(self, answer: Answer, events: Sequence[Event], piece: Piece) -> Json | None:
        """A piece of text, with log-probabilities if requested."""
        text = text_of(events, Kind.CONTENT)
        if not (self.has_logprobs and piece.choices):
            return {"text": text} if text else None
        return {"text": text, "logprobs": self._logprobs(answer, piece.choices)}

    def last_delta(self) -> Json:
        """No text."""
        return {"text": ""}

    def choice(self, answer: Answer) -> Json:
        """The text."""
        logprobs = self._logprobs(answer, answer.tokens) if self.has_logprobs else None
        prompt = self._prompts[answer.index]
        if self._echoes and logprobs is not None:
            echoed = prompt.logprobs(answer.scores, self.parameters.settings.logprobs or 0)
            logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        found: Json = {"text": answer.text(Kind.CONTENT), "logprobs": logprobs}
        if self._likely is not None:
            found["prompt_logprobs"] = prompt.by_token(answer.scores, self._likely)
        return found

    def _logprobs(self, answer: Answer, tokens: Sequence[TokenChoice]) -> Json:
        """The log-probabilities of the next tokens of an answer."""
        return text_logprobs(self.model.tokenizer, tokens, self._offsets[answer.index])
