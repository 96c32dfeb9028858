"""Separates a model's reasoning from its answer: <think>...</think>."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from urdir.model.text.call_form import controls_in
from urdir.model.text.tags import MOST_SPACE, begun_after_space, without_space


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around the reasoning of a kind of model."""

    begin: str
    end: str

    @property
    def controls(self) -> tuple[str, ...]:
        """The texts in them that may be control tokens."""
        return (self.begin, self.end, *controls_in((self.begin, self.end)))


# A template that writes or cuts out reasoning contains the tag.
THINK_TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<seed:think>", "</seed:think>"),
)


class _State(Enum):
    START = auto()  # only white space or part of the tag so far
    THOUGHTS = auto()
    AFTER = auto()  # white space after the reasoning
    ANSWER = auto()


class ReasoningSplitter:
    """Splits streamed text into reasoning and answer.

    Reasoning occurs at the start only; later tags are text. White space around the reasoning
    belongs to the tags. An answer without tags passes unchanged.
    """

    def __init__(self, tags: ThinkTags, begun: bool = False) -> None:
        """`begun`: the prompt ends with the tag (`prompt_begins`), so the text starts as
        reasoning."""
        self._tags = tags
        self._begun = begun
        self._at_first_thought = True
        self._state = _State.START
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may still be part of a tag."""
        return self._held

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that `text` reveals."""
        self._held += text
        thoughts = ""
        if self._state is _State.START:
            self._start()
        if self._state is _State.THOUGHTS:
            thoughts = self._think()
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            return thoughts, self._take(len(self._held))
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        """End the answer; the text that was still withheld."""
        rest = self._take(len(self._held))
        if self._state is _State.AFTER:
            return "", ""
        thinks = self._state is _State.THOUGHTS or (self._state is _State.START and self._begun)
        return (rest, "") if thinks else ("", rest)

    def _start(self) -> None:
        begin, text = self._tags.begin, self._held.lstrip()
        if len(self._held) - len(text) > MOST_SPACE:
            self._state = _State.THOUGHTS if self._begun else _State.ANSWER
        elif text.startswith(begin):
            self._held = text[len(begin) :]
            self._state = _State.THOUGHTS
        elif not begin.startswith(text):
            self._state = _State.THOUGHTS if self._begun else _State.ANSWER

    def _think(self) -> str:
        end = self._tags.end
        if self._at_first_thought:
            self._held = self._held.lstrip()
            self._at_first_thought = not self._held
        if (found := self._held.find(end)) >= 0:
            thoughts = without_space(self._take(found + len(end))[:found])
            self._state = _State.AFTER
        else:
            thoughts = self._take(len(self._held) - begun_after_space(self._held, (end,)))
        return thoughts

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def prompt_begins(tags: ThinkTags, prompt: str) -> bool:
    """Whether a rendered prompt ends with the tag, so that the answer begins with reasoning."""
    return prompt.rstrip().endswith(tags.begin)


def is_thinking(tags: ThinkTags, prompt: str, begun: str = "") -> bool | None:
    """Whether the next text is reasoning: True, False, or None if the model decides.

    `prompt` is the rendered conversation up to the answer, `begun` the start of the answer.
    """
    if begun.strip():
        thinks = prompt_begins(tags, prompt) or begun.lstrip().startswith(tags.begin)
        return thinks and tags.end not in begun
    if prompt.rstrip().endswith(tags.end):
        return False
    return True if prompt_begins(tags, prompt) else None
