"""Placement of the system text for templates without a system role, or with one for one text alone.

Whether a template drops or refuses the role is found by rendering, as in llama.cpp; the text then
precedes that of the first user turn. Several texts at the beginning, as Codex has them, are joined
where a template drops or refuses some of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from urdir.model.errors import TemplateError

Turn = dict[str, Any]
_NEEDLE = "urdir-7f3a"  # occurs in no template


class SystemText:
    """Places the system text for one template."""

    def __init__(self, render: Callable[[list[Turn]], str]) -> None:
        """`render` renders turns, or raises TemplateError."""
        self._render = render
        self._is_taken: bool | None = None
        self._are_taken: bool | None = None  # several

    def placed(self, turns: list[Turn]) -> list[Turn]:
        """The turns in the form that the template accepts; warns once if the system text is
        moved."""
        if not turns or turns[0]["role"] != "system":
            return turns
        turns = self._joined(turns)
        if self._is_taken is None:
            self._is_taken = self._takes_system_role()
            if not self._is_taken:
                warnings.warn(
                    "the chat template has no system role: its text goes into the first user turn",
                    stacklevel=3,
                )
        if self._is_taken:
            return turns
        system, *others = turns
        if not others or others[0]["role"] != "user":
            return [{**system, "role": "user"}, *others]
        user = others.pop(0)
        return [{**user, "content": f"{system['content']}\n{user['content']}"}, *others]

    def _joined(self, turns: list[Turn]) -> list[Turn]:
        """The turns with one system text at their beginning, unless the template takes several."""
        texts = [turn["content"] for turn in takewhile(lambda t: t["role"] == "system", turns)]
        if len(texts) < 2:
            return turns
        if self._are_taken is None:
            several = [{"role": "system", "content": _NEEDLE + end} for end in "ab"]
            shown = self._rendered([*several, {"role": "user", "content": "a"}])
            self._are_taken = all(turn["content"] in shown for turn in several)
        if self._are_taken:
            return turns
        return [{**turns[0], "content": "\n\n".join(texts)}, *turns[len(texts) :]]

    def _takes_system_role(self) -> bool:
        """Whether a system text is rendered; True as well if a user's text is not."""
        user = {"role": "user", "content": "a"}
        return self._shows([{"role": "system", "content": _NEEDLE}, user]) or not self._shows(
            [{**user, "content": _NEEDLE}]
        )

    def _shows(self, turns: list[Turn]) -> bool:
        return _NEEDLE in self._rendered(turns)

    def _rendered(self, turns: list[Turn]) -> str:
        """What the template makes of turns; nothing if it fails."""
        try:
            return self._render(turns)
        except TemplateError:
            return ""
