"""Conversations to prompts, by the model's own chat template.

The template's markup is parsed for control tokens ("<|im_end|>"). What users wrote is not (message
contents, calls of tools and their results, descriptions of tools): nobody forges a turn by typing
one. To tell the two apart in the rendered text, every character of a user's text with which a
control token can begin is replaced by a stand-in from Unicode's private use area before rendering;
afterwards the stand-ins are turned back and their places are what `Tokenizer.encode` takes as
`opaque`. Whatever a template does to texts (trims, cuts, joins, deletes), no character that is left
can begin a control token, and the rest of the text is still encoded in one piece with the markup
around it, as the model was trained.

Templates look for some tags in contents themselves, as "</think>". Those that a template names are
left as they are, provided that the prompt has the same control tokens as without this.

Limits: a template does not see control tokens that stand in contents (it cannot cut at them), and
one that spells half a control token itself and lets a message complete it is not guarded against.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.files.model_file import ModelFile
from urdir.model.owner import Owner
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.sandbox_worker import OUTPUT_LIMIT
from urdir.model.text.system_text import SystemText, Turn
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
    opaque: tuple[Span, ...]  # characters of messages with which no control token begins


class ChatTemplate(Owner):
    """Renders and tokenises conversations; a context manager that owns the rendering process."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> None:
        """`source` is the Jinja template; `process`, which may have begun, is owned from now on."""
        self.source = source
        self._tokenizer = tokenizer
        self._process = process or TemplateProcess()
        self._control = tokenizer.control_tokens()
        first = "".join(text[0] for text in self._control)
        # "striptags" makes "<" of "&lt;"
        self._starts = frozenset(first.lower() + first.upper() + "&")
        self._tags = _tags(source, self._starts, self._control)
        self._system = SystemText(self._render_turns)

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
            [{"role": m.role, "content": m.content, **m.more} for m in messages],
            tools or None,
            dict(variables or {}),
        ]
        texts = set(_texts(written))
        if (length := sum(len(message.content) for message in messages)) > OUTPUT_LIMIT:
            raise TemplateError(
                f"the conversation has {length:,} characters: at most {OUTPUT_LIMIT:,} go through "
                "a chat template"
            )
        prompt = self._render(written, texts, _NO_TAGS)
        if any(self._tags.search(text) for text in texts):
            with_tags = self._render(written, texts, self._tags)
            if self._controls(with_tags) == self._controls(prompt):
                return with_tags
        return prompt

    def _render(self, written: Any, texts: Collection[str], tags: re.Pattern[str]) -> Prompt:
        """The conversation, in whose ``texts`` ``tags`` are left as they are."""
        used = {char for text in texts for char in text if char in self._starts}
        stand_ins = _stand_ins(used, [self.source, *texts])
        turns, tools, more = _map_texts(written, lambda text: _substitute(text, stand_ins, tags))
        rendered = self._render_turns(self._system.placed(turns), tools, more)
        original = {stand_in: char for char, stand_in in stand_ins.items()}
        opaque = tuple((i, i + 1) for i, char in enumerate(rendered) if char in original)
        return Prompt("".join(original.get(char, char) for char in rendered), opaque)

    def _controls(self, prompt: Prompt) -> list[int]:
        """The control tokens of a prompt."""
        ids = self._tokenizer.encode(prompt.text, parse_special=True, opaque=prompt.opaque)
        known = set(self._control.values())
        return [token_id for token_id in ids if token_id in known]

    def close(self) -> None:
        """End the rendering process; closing twice does nothing."""
        self._process.close()

    def _render_turns(
        self, turns: list[Turn], tools: Any = None, more: Mapping[str, Any] | None = None
    ) -> str:
        """Their text. A template that fails on tools that are none sees them undefined."""
        variables = self._variables(turns, tools, more or {})
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

    def _variables(self, turns: list[Turn], tools: Any, more: Mapping[str, Any]) -> dict[str, Any]:
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


_NO_TAGS = re.compile("(?!)")
_BLOCK = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_MOST_TAGS, _LONGEST_TAG = 256, 64


def _tags(source: str, starts: Collection[str], control: Iterable[str]) -> re.Pattern[str]:
    """The strings in a template's expressions that begin as control tokens do, but are none."""
    literals = (a or b for block in _BLOCK.findall(source) for a, b in _LITERAL.findall(block))
    tags = {text.strip() for text in literals if text.strip()[:1] in starts}
    tags = {tag for tag in tags if 1 < len(tag) <= _LONGEST_TAG}
    ordered = sorted(text.lower() for text in control)
    known = set(ordered)

    def is_control(tag: str) -> bool:
        at = bisect_left(ordered, tag)
        begins_one = at < len(ordered) and ordered[at].startswith(tag)
        return begins_one or any(tag[:n] in known for n in range(1, len(tag)))

    usable = sorted(tag for tag in tags if not is_control(tag.lower()))[:_MOST_TAGS]
    return re.compile("|".join(map(re.escape, usable))) if usable else _NO_TAGS


def _stand_ins(characters: Iterable[str], texts: Sequence[str]) -> dict[str, str]:
    """A private use character for each of `characters`, one that none of `texts` holds."""
    used = set().union(*texts)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    chosen = dict(zip(sorted(characters), free, strict=False))
    if len(chosen) < len(set(characters)):
        raise TemplateError("the conversation uses up Unicode's private use area")
    return chosen


def _substitute(text: str, stand_ins: dict[str, str], tags: re.Pattern[str]) -> str:
    """``text`` with stand-ins but in ``tags``."""
    table, parts, end = str.maketrans(stand_ins), list[str](), 0
    for tag in tags.finditer(text):
        parts += [text[end : tag.start()].translate(table), tag[0]]
        end = tag.end()
    return "".join([*parts, text[end:].translate(table)])


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
    """A JSON value with each of its strings changed. Keys and roles that are words stay: templates
    look for them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else change(key): item
            if key == "role" and str(item).isidentifier()
            else _map_texts(item, change)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_map_texts(item, change) for item in value]
    return value
