"""What a call of the library may say about its answer, and the request made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from urdir.model.engine.requests.request import Request
from urdir.model.text.formats import Format, given_format

if TYPE_CHECKING:
    from urdir.model.engine.logit_processor import LogitProcessor
    from urdir.model.engine.sampling_settings import SamplingSettings
    from urdir.model.text.constraints import Constraint

ToolDescriptions = Sequence[Mapping[str, Any]]


class AnswerOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` and its kin.

    ``settings`` say how tokens are chosen (`Engine.default_settings`), ``limit`` how many at most,
    ``stops`` at which texts the answer ends. At most one of these says what the answer is:
    ``response_format`` (OpenAI's object: ``{"type": "json_object"}``, or ``{"type": "json_schema",
    "json_schema": {"schema": {...}}}``), ``grammar`` (GBNF or Lark) or ``regex``. They need
    llguidance (extra `serve`). ``processors`` change the logits before tokens are chosen.
    ``adapters`` are names of LoRA adapters, or pairs of a name and a scale (None: the engine's).
    """

    settings: SamplingSettings | None
    limit: int | None
    stops: str | Sequence[str]
    response_format: Mapping[str, Any] | None
    grammar: str | None
    regex: str | None
    processors: Sequence[LogitProcessor]
    adapters: Sequence[str | tuple[str, float]] | None


class ChatOptions(AnswerOptions, total=False):
    """Keyword arguments of `Engine.chat` and `Engine.chat_async`: `AnswerOptions`, and these.

    ``tools`` are descriptions in OpenAI's form; ``tool_choice`` is "auto", "none", "required" or
    the name of the tool to call. ``variables`` are what else the template may read
    ("enable_thinking").
    """

    tools: ToolDescriptions | None
    tool_choice: str
    variables: Mapping[str, Any] | None


def check_options(options: AnswerOptions, known: type) -> None:
    """Refuse keywords that ``known``, a class of options, does not have. Raises TypeError."""
    names = {name for each in known.__mro__ for name in getattr(each, "__annotations__", ())}
    if unknown := options.keys() - names:
        raise TypeError(f"no option {min(unknown)!r}: expected {', '.join(sorted(names))}")


def of_whole_answer(form: Format | None) -> Constraint | None:
    """The constraint of a format that all of an answer has."""
    return None if form is None else form.constraint()


def _with_scale(adapter: str | tuple[str, float]) -> tuple[str, float]:
    return (adapter, 1.0) if isinstance(adapter, str) else adapter


def make_request(
    tokens: Sequence[int],
    default_settings: SamplingSettings,
    options: AnswerOptions,
    *,
    shown: frozenset[str] = frozenset(),
    constrain: Callable[[Format | None], Constraint | None] = of_whole_answer,
) -> Request:
    """A request with ``options``; ``constrain`` makes the constraint of their format. Raises
    SettingsError, ConstraintError, ModelError."""
    stops, adapters = options.get("stops", ()), options.get("adapters")
    form = given_format(
        options.get("response_format"), options.get("grammar"), options.get("regex")
    )
    return Request(
        prompt=tuple(tokens),
        settings=options.get("settings") or default_settings,
        limit=options.get("limit"),
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
        constraint=constrain(form),
        adapters=None if adapters is None else tuple(map(_with_scale, adapters)),
        processors=tuple(options.get("processors", ())),
        shown=shown,
    )
