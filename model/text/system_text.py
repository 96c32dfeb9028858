"""Placement of system texts for templates without a system role, or with one for one text alone.

Whether a template drops or refuses a text is found by rendering, as in llama.cpp. The first one
then precedes that of the first user turn; several at the beginning, as Codex has them, are joined;
and later ones, as Claude Code has them, become text of the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from urdir.model.errors import TemplateError

Turn = dict[str, Any]
_NEEDLE = "urdir-7f3a"  # occurs in no template
_SEVERAL: list[Turn] = [{"role": "system", "content": _NEEDLE + end} for end in "ab"]
_USER: Turn = {"role": "user", "content": "a"}


class SystemText:
    """Places system texts for one template."""

    def __init__(self, render: Callable[[list[Turn]], str]) -> None:
        """`render` renders turns, or raises TemplateError."""
        self._render = render
        self._is_taken: bool | None = None
        self._several_are_taken: bool | None = None
        self._later_is_taken: bool | None = None

    def placed(self, turns: list[Turn]) -> list[Turn]:
        """The turns in the form that the template accepts; warns once if the system text is
        moved."""
        turns = self._joined(turns)
        if any(turn["role"] == "system" for turn in turns[1:]):
            turns = self._all_placed(turns)
        if not turns or turns[0]["role"] != "system":
            return turns
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
        if self._several_are_taken is None:
            self._several_are_taken = self._shows([*_SEVERAL, _USER])
        if self._several_are_taken:
            return turns
        return [{**turns[0], "content": "\n\n".join(texts)}, *turns[len(texts) :]]

    def _all_placed(self, turns: list[Turn]) -> list[Turn]:
        """The turns with later system texts at the end of a user turn before them, else at the
        beginning of one after them, unless the template takes them; warns once."""
        if self._later_is_taken is None:
            first, later = _SEVERAL
            self._later_is_taken = self._shows([first, _USER, later])
            if not self._later_is_taken:
                warnings.warn(
                    "the chat template takes no later system text: it goes into a user turn",
                    stacklevel=4,
                )
        if self._later_is_taken:
            return turns
        placed, is_open = turns[:1], False
        for turn in turns[1:]:
            is_system = turn["role"] == "system"
            joins = is_system or (is_open and turn["role"] == "user")
            if joins and placed[-1]["role"] == "user":
                last = placed.pop()
                placed.append({**last, "content": f"{last['content']}\n\n{turn['content']}"})
                is_open = is_open and is_system
            else:
                placed.append({**turn, "role": "user"} if is_system else turn)
                is_open = is_system
        return placed

    def _takes_system_role(self) -> bool:
        """Whether a system text is rendered; True as well if a user's text is not."""
        return self._shows([_SEVERAL[0], _USER]) or not self._shows([{**_USER, "content": _NEEDLE}])

    def _shows(self, turns: list[Turn]) -> bool:
        """Whether the texts of `turns` that are needles are rendered."""
        try:
            rendered = self._render(turns)
        except TemplateError:
            return False
        texts = [turn["content"] for turn in turns]
        return all(text in rendered for text in texts if text.startswith(_NEEDLE))
