"""Conversations to prompts, by the model's own chat template.

The template's markup is parsed for control tokens ("<|im_end|>"). What users wrote is not (message
contents, calls of tools and their results, descriptions of tools): nobody forges a turn by typing
one. To tell the two apart in the rendered text, each character of a user's text that begins the
text of a control token (or a part of one at its end) is replaced by a stand-in from Unicode's
private use area before rendering; afterwards the stand-ins are turned back and their places are
what `Tokenizer.encode` takes as `opaque`. Whatever a template does to texts (trims, cuts, joins,
compares), a stand-in is treated as an ordinary character, and the rest is still encoded in one
piece with the markup around it, as the model was trained.

Limits: a template does not see control tokens that stand in contents (it cannot cut at them), and
one that spells half a control token itself and lets a message complete it is not guarded against.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.files.model_file import ModelFile
from urdir.model.owner import Owner
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.sandbox_worker import OUTPUT_LIMIT
from urdir.model.text.system_text import SystemText
from urdir.model.text.tokenizer import Span, Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)  # "tool_calls", "tool_call_id", ...: JSON

    @classmethod
    def of(cls, message: Message | Mapping[str, Any]) -> Message:
        """A message, or a dictionary of its fields as OpenAI has them. Raises TemplateError."""
        if isinstance(message, Message):
            return message
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        role, content = message.get("role"), message.get("content")
        if content is None and "tool_calls" in more:
            content = ""
        if not isinstance(role, str) or not isinstance(content, str):
            raise TemplateError(
                f"a message needs a role and a content, both texts: {message!r:.80}"
            )
        return cls(role, content, more)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    text: str
    opaque: tuple[Span, ...]  # where message contents spell control tokens


class ChatTemplate(Owner):
    """Renders and tokenises conversations; a context manager that owns the rendering process."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> None:
        """`source` is the Jinja template; `process`, which may have begun, is owned from now on."""
        self.source = source
        self._tokenizer = tokenizer
        self._process = process or TemplateProcess()
        self._marker = _Marker(tokenizer.control_texts())
        self._system = SystemText(lambda turns: self._render_turns(turns, None, {}))

    @classmethod
    def from_gguf(
        cls, gguf: ModelFile, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> ChatTemplate:
        """The file's template; TemplateError where it has none."""
        source = gguf.metadata.optional(TEMPLATE_KEY, str, None)
        if source is None:
            raise TemplateError(
                f"{gguf.path}: the file has no chat template ({TEMPLATE_KEY}): the model continues "
                "plain prompts only"
            )
        return cls(source, tokenizer, process)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation up to where the assistant answers, BOS as the model wants.

        Raises TemplateError, or TokenizerError for contents that are no valid Unicode.
        """
        return self.tokens(self.render(messages))

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a rendered conversation, BOS as the model wants.

        Raises TokenizerError for contents that are no valid Unicode.
        """
        return self._tokenizer.encode(
            prompt.text, parse_special=True, add_bos=True, opaque=prompt.opaque
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The conversation up to where the assistant answers, as text.

        ``tools`` are descriptions in OpenAI's form, ``variables`` what else the template may read
        ("enable_thinking"); both are JSON. Raises TemplateError: exceeded limits, syntax, sandbox,
        or the template's own complaint.
        """
        written = [
            [{"content": message.content, **message.more} for message in messages],
            tools or None,
            dict(variables or {}),
        ]
        texts = set(_texts(written))
        if (length := sum(map(len, texts))) > OUTPUT_LIMIT:
            raise TemplateError(
                f"the conversation has {length:,} characters: at most {OUTPUT_LIMIT:,} go through "
                "a chat template"
            )
        marked = {text: self._marker.places(text) for text in texts}
        characters = {text[i] for text, places in marked.items() for i in places}
        stand_ins = _stand_ins(characters, [self.source, *texts])
        contents, tools, more = _map_texts(
            written, lambda text: _substitute(text, marked[text], stand_ins)
        )
        turns = [{"role": m.role, **c} for m, c in zip(messages, contents, strict=True)]
        rendered = self._render_turns(self._system.placed(turns), tools, more)
        original = {stand_in: char for char, stand_in in stand_ins.items()}
        opaque = tuple((i, i + 1) for i, char in enumerate(rendered) if char in original)
        return Prompt("".join(original.get(char, char) for char in rendered), opaque)

    def close(self) -> None:
        """End the rendering process; closing twice does nothing."""
        self._process.close()

    def _render_turns(
        self, turns: list[dict[str, Any]], tools: Any, more: Mapping[str, Any]
    ) -> str:
        """Their text. A template that fails on tools that are none sees them undefined."""
        variables = self._variables(turns, tools, more)
        try:
            return self._process.render(self.source, variables)
        except TemplateError as error:
            if tools is not None or self._process.pid is None:  # it exceeded a limit
                raise
            del variables["tools"]
            try:
                return self._process.render(self.source, variables)
            except TemplateError:
                raise error from None

    def _variables(
        self, turns: list[dict[str, Any]], tools: Any, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What templates expect to be defined."""
        return {
            "add_generation_prompt": True,
            "documents": None,
            **more,
            "messages": turns,
            "tools": tools,
            "bos_token": self._text(self._tokenizer.bos_id),
            "eos_token": self._text(self._tokenizer.eos_id),
        }

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.token_text(token_id)


class _Marker:
    """Finds where contents spell a control token, or begin one at their end.

    Case is ignored, and white space at the end, since a template may change either.
    """

    def __init__(self, control_texts: Iterable[str]) -> None:
        texts = sorted(control_texts)
        whole = "|".join(map(re.escape, texts)) or "(?!)"
        # A lookahead finds overlapping ones as well
        self._whole = re.compile(f"(?={whole})", re.IGNORECASE)
        self._beginnings = {text[:n].lower() for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def places(self, content: str) -> set[int]:
        """The first character of each."""
        end = len(content.rstrip())
        at_end = range(max(0, end - self._longest), end)
        return {match.start() for match in self._whole.finditer(content)} | {
            start for start in at_end if content[start:end].lower() in self._beginnings
        }


def _stand_ins(characters: Iterable[str], texts: Sequence[str]) -> dict[str, str]:
    """A private use character for each of `characters`, one that none of `texts` holds."""
    used = set().union(*texts)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    chosen = dict(zip(sorted(characters), free, strict=False))
    if len(chosen) < len(set(characters)):
        raise TemplateError("the conversation uses up Unicode's private use area")
    return chosen


def _substitute(text: str, places: set[int], stand_ins: dict[str, str]) -> str:
    return "".join(stand_ins[char] if i in places else char for i, char in enumerate(text))


def _texts(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each of its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_texts(item, change) for item in value]
    return value
