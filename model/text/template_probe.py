"""Renders a chat template with known turns, to see how it writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.text.call_form import tags

Turn = dict[str, Any]
Render = Callable[[list[Turn], list[Turn], Mapping[str, Any]], str]
"""Renders turns, tools and other variables. Raises TemplateError."""

CONTENT, THOUGHT = "Zcontentz", "Zthoughtz"
_LONGEST = 1 << 16  # characters; templates write 10,000 of two tools and a call
NAMES = ("fn_alpha", "fn_beta")
USER: Turn = {"role": "user", "content": "Zuserz"}
TOOLS: list[Turn] = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": {
        "type": "object", "properties": {
            "key_one": {"type": "string", "description": "The first."},
            "key_two": {"type": "integer", "description": "The second."}},
        "required": ["key_one", "key_two"]}}}
    for name in NAMES
]  # fmt: skip


class Probe:
    """What a template makes of a user's turn and an answer; None where it raises an error, or
    writes half characters or more than a template does."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def prompt(self, **variables: Any) -> str | None:
        """The text up to the answer."""
        return self._rendered([USER], {**variables, "add_generation_prompt": True})

    def answer(self, content: str | None = CONTENT, **fields: Any) -> str | None:
        """The text with an answer."""
        turn = {"role": "assistant", "content": content, **fields}
        return self._rendered([USER, turn], {"add_generation_prompt": False})

    def _rendered(self, turns: list[Turn], variables: Mapping[str, Any]) -> str | None:
        try:
            text = self._render(turns, TOOLS, variables)
            text.encode()
        except (TemplateError, UnicodeEncodeError):
            return None
        return text if len(text) <= _LONGEST else None


def shared_start(first: str, second: str) -> str:
    """The common start of two texts, which ends between tags."""
    return "".join(_shared(tags(first), tags(second)))


def shared_end(first: str, second: str) -> str:
    """The common end of two texts, which begins between tags."""
    return "".join(reversed(_shared(tags(first)[::-1], tags(second)[::-1])))


def _shared(first: Sequence[str], second: Sequence[str]) -> Sequence[str]:
    pairs = enumerate(zip(first, second, strict=False))
    count = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    return first[:count]
