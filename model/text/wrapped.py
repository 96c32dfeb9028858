"""Takes content out of the tags that some models write around it."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.text.call_form import controls_in
from urdir.model.text.tags import begun


@dataclass(frozen=True, slots=True)
class ContentTags:
    """The texts around content; ``end`` may be empty."""

    begin: str
    end: str

    @property
    def controls(self) -> tuple[str, ...]:
        """Those that may be control tokens."""
        return controls_in((self.begin, self.end))

    @property
    def occurs_later(self) -> bool:
        """Whether the beginning is a tag, and as such not only removed from the start."""
        return self.begin.startswith(("<", "["))


class ContentSplitter:
    """Removes the tags around content from a streamed answer; other text passes unchanged."""

    def __init__(self, tags: ContentTags) -> None:
        self._tags = tags
        self._removed = tuple(
            tag for tag in (tags.end, tags.begin if tags.occurs_later else "") if tag
        )
        self._at_start = not tags.occurs_later
        self.held = ""

    def push(self, text: str) -> str:
        """The text that becomes known with more of it."""
        text, self.held = self.held + text, ""
        if self._at_start:
            begin = self._tags.begin
            if begin.startswith(text):
                self.held = text
                return ""
            self._at_start = False
            text = text.removeprefix(begin)
        for tag in self._removed:
            text = text.replace(tag, "")
        cut = len(text) - begun(text, self._removed)
        self.held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text that was withheld."""
        text, self.held = self.held, ""
        return text
