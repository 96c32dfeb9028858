"""Parse answers into content, reasoning and tool calls.

`find_answer_format` infers from a chat template how its model writes them; `AnswerParser` splits a
streamed answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from urdir.model.text import harmony
from urdir.model.text.call_formats import GENERIC, CallFormat, find_call_format
from urdir.model.text.deltas import CallNumbers, Delta, as_content, new_call_id
from urdir.model.text.harmony import HarmonySplitter
from urdir.model.text.reasoning import THINK_TAGS, ReasoningSplitter, ThinkTags, prompt_begins
from urdir.model.text.tags import shared_length
from urdir.model.text.tool_calls import CallSplitter, Tools


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and calls; None: not supported. ``harmony``: as gpt-oss does."""

    calls: CallFormat | None = None
    thinks: ThinkTags | None = None
    is_harmony: bool = False

    @property
    def shown(self) -> frozenset[str]:
        """The control tokens that a parser must see (`TextStream`)."""
        controls = set(harmony.CONTROLS) if self.is_harmony else set()
        if self.calls is not None:
            controls.update(self.calls.controls)
        if self.thinks is not None:
            controls.update((self.thinks.begin, self.thinks.end))
        return frozenset(controls)

    @property
    def is_generic(self) -> bool:
        """Whether tools are described as text, since the template has no known call format."""
        return self.calls is GENERIC


def find_answer_format(template: str) -> AnswerFormat:
    """Infer the format from the text of a chat template, by the tags that it writes or cuts out."""
    if all(tag in template for tag in harmony.EVIDENCE):
        return AnswerFormat(is_harmony=True)
    thinks = next((tags for tags in THINK_TAGS if tags.end in template), None)
    return AnswerFormat(find_call_format(template), thinks)


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
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`prompt` is the rendered conversation, which may end within the reasoning. `begun` is the
        start of the answer that the client already has; it is not reported again. Without `tools`,
        calls are content.
        """
        numbers = CallNumbers(new_id)
        self._thoughts: ReasoningSplitter | None = None
        self._rest: CallSplitter | HarmonySplitter | None = None
        if form.is_harmony:
            self._rest = HarmonySplitter(numbers)
        elif form.calls is not None and tools:
            self._rest = CallSplitter(form.calls.tags, tools, numbers)
        if form.thinks is not None:
            self._thoughts = ReasoningSplitter(form.thinks, prompt_begins(form.thinks, prompt))
        self._known = ""  # withheld text that the client already has
        if begun:
            self._push((harmony.header(prompt) if form.is_harmony else "") + begun)
            self._known = "".join(part.held for part in (self._thoughts, self._rest) if part)

    def push(self, text: str) -> list[Delta]:
        """Process more text; what it reveals."""
        return self._new(self._push(text))

    def finish(self) -> list[Delta]:
        """End the answer; the text that was still withheld."""
        thoughts, text = ("", "") if self._thoughts is None else self._thoughts.finish()
        rest = [] if self._rest is None else self._rest.push(text) + self._rest.finish()
        return self._new(
            _reasoning(thoughts) + (rest if self._rest is not None else as_content(text))
        )

    def _push(self, text: str) -> list[Delta]:
        thoughts, text = ("", text) if self._thoughts is None else self._thoughts.push(text)
        return _reasoning(thoughts) + self._answer(text)

    def _new(self, deltas: list[Delta]) -> list[Delta]:
        """`deltas` without the text that the client already has."""
        while self._known and deltas:
            first, *others = deltas
            text = first.content or first.reasoning
            count = shared_length(text, self._known)
            self._known = self._known[count:] if 0 < count == len(text) else ""
            left = text[count:]
            kept = as_content(left) if first.content else _reasoning(left)
            deltas = [*kept, *others] if count else deltas
        return deltas

    def _answer(self, text: str) -> list[Delta]:
        return as_content(text) if self._rest is None else self._rest.push(text)


def _reasoning(text: str) -> list[Delta]:
    return [Delta(reasoning=text)] if text else []
