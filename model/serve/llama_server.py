"""POST /completion and /infill, and what else llama-server's clients ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Piece, TokenChoice
from urdir.model.engine.sampling_settings import SETTINGS, SamplingSettings
from urdir.model.serve.answer import Answer, Event, Kind, Reason, text_of
from urdir.model.serve.asked import Asked, Mixed, fill_tokens, render
from urdir.model.serve.completions import read_prompts
from urdir.model.serve.conversations import read_conversation
from urdir.model.serve.errors import ApiError
from urdir.model.serve.fields import Fields
from urdir.model.serve.formats import read_format
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.logprobs import chat_logprobs
from urdir.model.serve.parameters import MOST_LOGPROBS, read_limit, read_parameters
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import INFILL, NATIVE
from urdir.model.serve.stream import DATA, Shape
from urdir.model.serve.usage import Usage
from urdir.model.serve.version import installed

_REASONS = dict.fromkeys(Reason, "limit") | {Reason.END: "eos", Reason.STOP: "word"}


# ---- requests ----


def read_native(fields: Fields, model: ServedModel, limits: Limits) -> Asked:
    """Read a request of /completion; ApiError if it is invalid."""
    refuse_unsupported(fields, NATIVE)
    return _asked(fields, model, limits, None)


def read_infill(fields: Fields, model: ServedModel, limits: Limits) -> Asked:
    """Read a request of /infill: the text between two. ApiError if the model cannot do that."""
    refuse_unsupported(fields, INFILL)
    fill = fill_tokens(model)
    parts: list[str | int] = []
    for extra in fields.objects("input_extra"):
        begin = extra.text("filename") or ""
        parts += [f"\n{begin}\n"] if fill.file is None else [fill.file, f"{begin}\n"]
        parts.append(extra.needed_text("text"))
    before, after = fields.needed_text("input_prefix"), fields.needed_text("input_suffix")
    parts += [fill.before, before + (fields.text("prompt") or ""), fill.after, after, fill.gap]
    return _asked(fields, model, limits, (Mixed(tuple(parts)),))


def _asked(
    fields: Fields, model: ServedModel, limits: Limits, prompts: tuple[Mixed, ...] | None
) -> Asked:
    likely = fields.whole("n_probs", 0, MOST_LOGPROBS) or None
    names = ("n_predict", "max_tokens", "max_completion_tokens")
    limit = read_limit(fields, model, *names, least=0)
    parameters = read_parameters(fields, model, limits, limit, likely)
    inputs = prompts or read_prompts(fields, model, limits.answers // parameters.n)
    has_tokens = fields.flag("return_tokens") or parameters.stream  # as llama-server has it
    shape = TokensShape if has_tokens else NativeShape
    return Asked(inputs, parameters, read_format(fields, limits), shape)


# ---- answers ----


class NativeShape(Shape):
    """An object for each answer, or events without a last mark."""

    framing = DATA._replace(end=b"")
    has_tokens = False

    def part(self, answer: Answer, events: Sequence[Event], piece: Piece) -> list[Json]:
        """The new text, with probabilities or tokens if requested, whatever text these have."""
        text = text_of(events, Kind.CONTENT)
        if not text and not (piece.choices and (self._has_logprobs or self.has_tokens)):
            return []
        return [self._text(answer, text, piece.choices, ends=False)]

    def ending(self, answer: Answer, usage: Usage) -> list[Json]:
        """The last event of an answer, without text."""
        return [self._text(answer, "", (), ends=True) | self._end(answer, usage)]

    def whole(self, usage: Usage) -> Any:
        """The answer, or a list of several."""
        found = [
            self._text(answer, answer.text(Kind.CONTENT), answer.tokens, ends=True)
            | self._end(answer, usage)
            for answer in self.answers
        ]
        return found[0] if len(found) == 1 else found

    @property
    def _has_logprobs(self) -> bool:
        return self.parameters.settings.logprobs is not None

    def _text(
        self, answer: Answer, text: str, tokens: Sequence[TokenChoice], *, ends: bool
    ) -> Json:
        found: Json = {
            "index": answer.index,
            "content": text,
            "tokens": [choice.token for choice in tokens] if self.has_tokens else [],
            "stop": ends,
            "id_slot": -1,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": len(answer.prompt),
        }
        if self._has_logprobs and tokens:
            listed = chat_logprobs(self.model.tokenizer, tokens)
            for choice, token in zip(tokens, listed, strict=True):
                token["id"] = choice.token
                for (other, _), top in zip(choice.top, token["top_logprobs"], strict=True):
                    top["id"] = other
            found["completion_probabilities"] = listed
        return found

    def _end(self, answer: Answer, usage: Usage) -> Json:
        parameters = self.parameters
        return {
            "model": self.model.names[0],
            "generation_settings": _settings(parameters.settings)
            | {
                "n_predict": -1 if parameters.limit is None else parameters.limit,
                "stop": list(parameters.stops),
                "stream": parameters.stream,
            },
            "prompt": self.model.tokenizer.decode(answer.prompt, keep_control=True),
            "has_new_line": "\n" in answer.text(Kind.CONTENT),
            "truncated": False,
            "stop_type": _REASONS[answer.reason],
            "stopping_word": answer.stopped_by or "",
            "tokens_cached": len(answer.prompt) + len(answer.tokens),
            "timings": usage.timings(),
        }


class TokensShape(NativeShape):
    """The same with token ids, those within a character, too."""

    has_tokens = True


def _settings(settings: SamplingSettings) -> Json:
    return {name: getattr(settings, name) for name, row in SETTINGS.items() if row.field_of}


# ---- the model ----


def apply_template(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """POST /apply-template: a conversation as text."""
    return {"prompt": render(model, read_conversation(fields, model, limits)).text}


def props(model: ServedModel, now: Metrics) -> Json:
    """GET /props. Slots are requests that may run at once: they share the whole cache."""
    defaults = _settings(model.defaults.settings) | {"n_predict": model.defaults.limit or -1}
    return {
        "default_generation_settings": {"n_ctx": model.context, "params": defaults},
        "total_slots": _slots(now),
        "model_alias": model.names[0],
        "model_path": model.facts.file,
        "chat_template": model.template.source if model.template else "",
        "bos_token": _text_of(model, model.tokenizer.bos_id),
        "eos_token": _text_of(model, model.tokenizer.eos_id),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"urdir {installed()}",
        "is_sleeping": False,
    }


def _text_of(model: ServedModel, token: int | None) -> str:
    return "" if token is None else model.tokenizer.token_text(token)


def slots(model: ServedModel, now: Metrics, *, fails: bool) -> list[Json]:
    """GET /slots: one for each request that may run. Raises ApiError if it ``fails`` where none is
    idle."""
    count = _slots(now)
    if fails and now.running >= count:
        raise ApiError("no slot is idle", status=503, kind="unavailable_error", code="no_slot")
    return [
        {"id": number, "n_ctx": model.context, "is_processing": number < now.running}
        for number in range(count)
    ]


def _slots(now: Metrics) -> int:
    return max(1, now.sequences, now.running)
