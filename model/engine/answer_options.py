"""What a call of the library may say about its answer, and the request made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from urdir.model.engine.requests.request import Request
from urdir.model.engine.sampling_settings import SamplingSettings
from urdir.model.errors import SettingsError
from urdir.model.text.formats import Format, given_format

if TYPE_CHECKING:
    from urdir.model.engine.logit_processor import LogitProcessor
    from urdir.model.text.constraints import Constraint
    from urdir.model.text.thought_limit import ThoughtLimit
    from urdir.model.text.tokenizer import Tokenizer

#: What options of other libraries are here.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_tokens", "n_predict"), "limit=N has it"
    ),
    **dict.fromkeys(("thinking_budget_tokens", "thinking_budget"), "reasoning_budget=N has it"),
    "stop": "stops=[TEXT] has it",
    "enable_thinking": "variables={'enable_thinking': ...} has it",
    "json_schema": "response_format={'type': 'json_schema', 'json_schema': {'schema': ...}} has it",
    "logits_processor": "processors=[...] has it",
}

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
    the tool to call, its name or OpenAI's object. ``variables`` are what else the template may read
    ("enable_thinking"). Reasoning
    ends after ``reasoning_budget`` tokens (None: by itself), and the answer goes on; 0 is none.
    """

    tools: ToolDescriptions | None
    tool_choice: str | Mapping[str, Any]
    variables: Mapping[str, Any] | None
    reasoning_budget: int | None


def check_options(options: AnswerOptions, known: type) -> None:
    """Refuse keywords that ``known``, a class of options, does not have. Raises TypeError."""
    names = {name for each in known.__mro__ for name in getattr(each, "__annotations__", ())}
    if unknown := options.keys() - names:
        name = min(unknown)
        if name in {each.name for each in fields(SamplingSettings)}:
            raise TypeError(f"no option {name!r}: settings=SamplingSettings({name}=...) has it")
        hint = _OTHER_NAMES.get(name, f"expected {', '.join(sorted(names))}")
        raise TypeError(f"no option {name!r}: {hint}")


def of_whole_answer(form: Format | None) -> Constraint | None:
    """The constraint of a format that all of an answer has."""
    return None if form is None else form.constraint()


def _several(given: Any) -> tuple[Any, ...]:
    """What is given as one or as several; a text is one, and so is a mapping."""
    if given is None:
        return ()
    is_one = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    return (given,) if is_one else tuple(given)


def token_ids(tokenizer: Callable[[], Tokenizer], text: str | Sequence[int]) -> list[int]:
    """The tokens of a text, BOS first where the model wants one; ids that are given stay. Raises
    SettingsError for anything else."""
    if isinstance(text, str):
        return tokenizer().encode(text, parse_special=True, add_bos=True)
    several = "" if not _are_texts(text) else ": for several prompts there is generate_all"
    return ids_in(text, f"neither a text nor a list of token ids{several}")


def _are_texts(given: object) -> bool:
    return isinstance(given, Sequence) and bool(given) and all(isinstance(of, str) for of in given)


def ids_in(given: object, otherwise: str) -> list[int]:
    """The token ids that are given in any sequence. Raises SettingsError, which says that it "is
    ``otherwise``", for anything else."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray):
        found = [*given]
        ids = [int(of) for of in found if isinstance(of, Integral)]
        if len(ids) == len(found):
            return ids
    raise SettingsError(f"{given!r:.80} is {otherwise}")


def _with_scale(adapter: str | tuple[str, float]) -> tuple[str, float]:
    return (adapter, 1.0) if isinstance(adapter, str) else adapter


def make_request(
    tokens: Sequence[int],
    default_settings: SamplingSettings,
    options: AnswerOptions,
    *,
    shown: frozenset[str] = frozenset(),
    thoughts: ThoughtLimit | None = None,
    constrain: Callable[[Format | None], Constraint | None] = of_whole_answer,
) -> Request:
    """A request with ``options``; ``constrain`` makes the constraint of their format. Raises
    SettingsError, ConstraintError, ModelError."""
    adapters = options.get("adapters")
    form = given_format(
        options.get("response_format"), options.get("grammar"), options.get("regex")
    )
    return Request(
        prompt=tuple(tokens),
        settings=options.get("settings") or default_settings,
        limit=options.get("limit"),
        stops=_several(options.get("stops")),
        constraint=constrain(form),
        thoughts=thoughts,
        adapters=None if adapters is None else tuple(map(_with_scale, _several(adapters))),
        processors=_several(options.get("processors")),
        shown=shown,
    )
