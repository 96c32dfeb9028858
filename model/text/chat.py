"""Conversations to prompts, by the model's own chat template.

The template's markup is parsed for control tokens ("<|im_end|>"), message contents are not: nobody
forges a turn by typing one. To tell the two apart in the rendered text, every character of a
message with which a control token can begin is replaced by a stand-in from Unicode's private use
area before rendering; afterwards the stand-ins are turned back and their places are what
`Tokenizer.encode` takes as `opaque`. Whatever a template does to contents (trims, cuts, joins,
deletes), no character that is left can begin a control token, and the rest of the text is still
encoded in one piece with the markup around it, as the model was trained.

Templates look for some tags in contents themselves, as "</think>". Those that a template names are
left as they are, provided that the prompt has the same control tokens as without this.

Limits: a template does not see control tokens that stand in contents (it cannot cut at them), and
one that spells half a control token itself and lets a message complete it is not guarded against.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.files.model_file import ModelFile
from urdir.model.owner import Owner
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.tokenizer import Span, Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


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

    @classmethod
    def from_gguf(
        cls, gguf: ModelFile, tokenizer: Tokenizer, process: TemplateProcess | None = None
    ) -> ChatTemplate:
        """The file's template; TemplateError where it has none."""
        source = gguf.metadata.optional(TEMPLATE_KEY, str, None)
        if source is None:
            raise TemplateError(
                f"{gguf.path}: the file has no chat template ({TEMPLATE_KEY}); "
                "use --raw to give the model the plain prompt"
            )
        return cls(source, tokenizer, process)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation up to where the assistant answers, BOS as the model wants.

        Raises TemplateError, or TokenizerError for contents that are no valid Unicode.
        """
        prompt = self.render(messages)
        return self._tokenizer.encode(
            prompt.text, parse_special=True, add_bos=True, opaque=prompt.opaque
        )

    def render(self, messages: Sequence[Message]) -> Prompt:
        """The conversation up to where the assistant answers, as text.

        Raises TemplateError: exceeded limits, syntax, sandbox, or the template's own complaint.
        """
        prompt = self._render(messages, _NO_TAGS)
        if any(self._tags.search(message.content) for message in messages):
            with_tags = self._render(messages, self._tags)
            if self._controls(with_tags) == self._controls(prompt):
                return with_tags
        return prompt

    def _render(self, messages: Sequence[Message], tags: re.Pattern[str]) -> Prompt:
        """The conversation, in whose contents ``tags`` are left as they are."""
        fields = [text for m in messages for text in (m.role, m.content)]
        used = {char for text in fields for char in text if char in self._starts}
        stand_ins = _stand_ins(used, [self.source, *fields])
        turns = [
            {
                "role": _substitute(message.role, stand_ins, tags),
                "content": _substitute(message.content, stand_ins, tags),
            }
            for message in messages
        ]
        rendered = self._process.render(self.source, self._variables(turns))
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

    def _variables(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        """What templates expect to be defined."""
        return {
            "messages": turns,
            "add_generation_prompt": True,
            "bos_token": self._text(self._tokenizer.bos_id),
            "eos_token": self._text(self._tokenizer.eos_id),
            "tools": None,
            "documents": None,
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
