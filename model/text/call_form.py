"""How a model writes calls of tools, as data: derived from its chat template by `template_forms`.

    section_begin  begin PARTS end  between  begin PARTS end  section_end

`call_reader` reads calls by it, `tool_choice` writes grammars by it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

TAG = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]|\w+|.", re.DOTALL)
"""What a literal consists of: tags, words, and other characters."""


class Slot(Enum):
    """What a call says at a place of its text."""

    NAME = "name"
    ARGUMENTS = "arguments"
    ID = "id"
    INDEX = "index"  # the number of the call


Part = str | Slot


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a call that is one JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as keys and values between brackets: `(a="x", n=1)`, `{a:<|"|>x<|"|>,n:1}`."""

    open: str
    assign: str
    comma: str
    close: str
    quote: str  # around strings


KEY = "\0"
"""Stands for the key in `Tagged.end`."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments between tags, strings as they are, other values as JSON.

    A key is between ``begin`` and ``assign``, a value between ``assign`` and ``end``, in which
    `KEY` stands for the key. ``assigns`` have those of other JSON types than strings.
    """

    begin: str
    assign: str
    end: str
    between: str
    assigns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written. ``keys`` are those of a call in JSON, whose order does not matter;
    other calls are written exactly as ``parts`` say, with ``arguments`` in JSON if None.

    ``between`` is None where an answer has one call at most. ``is_list``: the calls are between
    brackets. ``others`` are more texts that may begin the calls. The template takes arguments
    ``as_text``, and ids of nine characters, if ``short_ids``; it writes the calls of earlier
    answers, if ``is_shown``. ``controls`` are the control tokens in these texts.
    """

    parts: tuple[Part, ...]
    begin: str = ""
    end: str = ""
    between: str | None = None
    section_begin: str = ""
    section_end: str = ""
    keys: Keys | None = None
    arguments: Pairs | Tagged | None = None
    is_list: bool = False
    others: tuple[str, ...] = ()
    as_text: bool = False
    short_ids: bool = False
    is_shown: bool = True
    controls: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls within an answer; none: calls begin the answer."""
        between = (self.between or "").strip()
        begin = (self.begin + "".join(p for p in self.parts[:1] if isinstance(p, str))).strip()
        found = [self.section_begin.strip(), *self.others]
        if self.keys is None or self.begin.strip():
            found.append((self.begin if self.keys else begin).strip())
        if not any(found) and len(between) > 1:
            found.append(between)
        return tuple(dict.fromkeys(text for text in found if _is_marker(text)))

    @property
    def is_bare(self) -> bool:
        """Whether an answer may begin with a call without any marker."""
        first = self.section_begin.strip() or self.begin.strip()
        if not first and self.keys is None and isinstance(self.parts[0], str):
            first = self.parts[0].strip()
        return not _is_marker(first)

    def literals(self) -> tuple[str, ...]:
        """All texts of the form."""
        texts = [self.section_begin, self.begin, self.end, self.between or "", self.section_end]
        texts += [part for part in self.parts if isinstance(part, str)] + [*self.others]
        match self.arguments:
            case Pairs(opening, assign, comma, close, quote):
                texts += [opening, assign, comma, close, quote]
            case Tagged(begin, assign, end, between, assigns):
                texts += [begin, assign, *end.split(KEY), between, *(text for _, text in assigns)]
        return tuple(text for text in texts if text)


def _is_marker(text: str) -> bool:
    """Whether a text is rare enough to begin a call wherever it stands."""
    is_rare = len(text) > 5 or (len(text) > 1 and any(char in text for char in "<>[|"))
    return is_rare and not text.startswith('{"')


def tags(text: str) -> list[str]:
    """The tags, words and characters of a text."""
    return TAG.findall(text)


def controls_in(texts: Collection[str], controls: Collection[str] = ()) -> tuple[str, ...]:
    """The control tokens that occur in texts; all tags in them, where none are known."""
    if not controls:
        controls = {tag for text in texts for tag in tags(text) if len(tag) > 2 and tag[0] in "<["}
    return tuple(sorted(c for c in controls if any(c in text for text in texts)))


_JSON_PARTS = ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}")

#: For templates without calls; tools are described as text (`generic_tools`).
GENERIC = CallForm(
    _JSON_PARTS,
    "<tool_call>\n",
    "\n</tool_call>",
    "\n",
    keys=Keys("name", "arguments"),
    controls=("<tool_call>", "</tool_call>"),
)
