"""Parse answers into content, reasoning and tool calls.

An `AnswerFormat` says how a model writes them; `AnswerParser` splits a streamed answer by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from urdir.model.text import harmony
from urdir.model.text.call_form import GENERIC, CallForm
from urdir.model.text.deltas import CallNumbers, Delta, as_content, new_call_id, short_call_id
from urdir.model.text.harmony import HarmonySplitter
from urdir.model.text.reasoning import ReasoningSplitter, ThinkTags, is_thinking, prompt_begins
from urdir.model.text.tags import shared_length
from urdir.model.text.thought_limit import ThoughtLimit
from urdir.model.text.tool_calls import CallSplitter
from urdir.model.text.tool_schemas import Tools
from urdir.model.text.wrapped import ContentSplitter, ContentTags


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning, calls and content; None: not supported, content without tags.
    ``harmony``: as gpt-oss does."""

    calls: CallForm | None = None
    thinks: ThinkTags | None = None
    content: ContentTags | None = None
    is_harmony: bool = False

    @property
    def shown(self) -> frozenset[str]:
        """The control tokens that a parser must see (`TextStream`)."""
        controls = set(harmony.CONTROLS) if self.is_harmony else set()
        if self.calls is not None:
            controls.update(self.calls.controls)
        for tags in (self.thinks, self.content):
            if tags is not None:
                controls.update(tags.controls)
        return frozenset(controls)

    def limit(
        self, tokens: int | None, prompt: str, message: str = "", begun: str = ""
    ) -> ThoughtLimit | None:
        """A limit of reasoning after a rendered prompt and the ``begun`` answer, which ``message``
        and the tag end; None without reasoning, or without a number."""
        if tokens is None:
            return None
        if self.is_harmony:
            begin, end = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END
            ending = f"{message}{end}{harmony.START}assistant"
            is_open = prompt.endswith(begin) and end not in begun
            return ThoughtLimit(tokens, begin, end, ending, is_open)
        if self.thinks is None:
            return None
        begin, end = self.thinks.begin, self.thinks.end
        is_open = is_thinking(self.thinks, prompt, begun) is True
        return ThoughtLimit(tokens, begin, end, message + end, is_open)

    @property
    def is_generic(self) -> bool:
        """Whether tools are described as text, since the template has no known call format."""
        return self.calls is GENERIC


class AnswerParser:
    """Splits one streamed answer into content, reasoning and calls.

    The result does not depend on how the text is cut; text without tags passes unchanged.
    """

    def __init__(
        self,
        form: AnswerFormat,
        *,
        prompt: str = "",
        begun: str = "",
        tools: Tools | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`prompt` is the rendered conversation, which may end within the reasoning. `begun` is the
        start of the answer that the client already has; it is not reported again. Without `tools`,
        calls are content.
        """
        is_short = form.calls is not None and form.calls.short_ids
        numbers = CallNumbers(new_id or (short_call_id if is_short else new_call_id))
        self._thoughts: ReasoningSplitter | None = None
        self._content: ContentSplitter | None = None
        self._rest: CallSplitter | HarmonySplitter | None = None
        if form.is_harmony:
            self._rest = HarmonySplitter(numbers)
        elif form.calls is not None and tools:
            self._rest = CallSplitter(form.calls, tools, numbers)
        if form.thinks is not None:
            self._thoughts = ReasoningSplitter(form.thinks, prompt_begins(form.thinks, prompt))
        if form.content is not None:
            self._content = ContentSplitter(form.content)
        self._known = ""  # withheld text that the client already has
        self._open: list[Delta] = []  # the beginning of a call that the client has as text
        if begun:
            deltas = self._push((harmony.header(prompt) if form.is_harmony else "") + begun)
            if numbers.is_open:
                self._open = [delta for delta in deltas if _index(delta) == numbers.index]
            self._known = "".join(
                part.held for part in (self._rest, self._content, self._thoughts) if part
            )

    def push(self, text: str) -> list[Delta]:
        """Process more text; what it reveals."""
        return self._new(self._push(text)) if text else []

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        thoughts, text = ("", "") if self._thoughts is None else self._thoughts.finish()
        if self._content is not None:
            text = self._content.push(text) + self._content.finish()
        rest = [] if self._rest is None else self._rest.push(text) + self._rest.finish()
        return self._new(
            _reasoning(thoughts) + (rest if self._rest is not None else as_content(text))
        )

    def _push(self, text: str) -> list[Delta]:
        thoughts, text = ("", text) if self._thoughts is None else self._thoughts.push(text)
        if self._content is not None:
            text = self._content.push(text)
        return _reasoning(thoughts) + self._answer(text)

    def _new(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` without the text that the client already has."""
        if not self._known and not self._open:
            return deltas
        found, self._open = [*self._open], []
        for delta in deltas:
            if delta.tool_call is None:
                found += self._unknown(delta)
                continue
            if delta.tool_call.ends and not delta.tool_call.is_broken:
                self._known = ""
            found.append(delta)
        return found

    def _unknown(self, delta: Delta) -> list[Delta]:
        """The part of a text that the client does not have."""
        text = delta.content or delta.reasoning
        count = shared_length(text, self._known)
        self._known = self._known[count:] if 0 < count == len(text) else ""
        if count == len(text):
            return []
        return [replace(delta, content=delta.content[count:], reasoning=delta.reasoning[count:])]

    def _answer(self, text: str) -> list[Delta]:
        return as_content(text) if self._rest is None else self._rest.push(text)


def _reasoning(text: str) -> list[Delta]:
    return [Delta(reasoning=text)] if text else []


def _index(delta: Delta) -> int | None:
    """The number of the call that a delta is part of."""
    return None if delta.tool_call is None else delta.tool_call.index
