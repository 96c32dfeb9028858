"""The tokens of two texts that a model compares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class Pair(tuple[int, ...]):
    """Tokens of two texts, of which those from number ``second`` on are of the second one."""

    second: int

    def __new__(cls, tokens: Iterable[int], second: int) -> Self:
        """The tokens of both texts, with the special ones around them."""
        made = super().__new__(cls, tokens)
        made.second = second
        return made

    def cut(self, most: int, ends: int) -> Pair:
        """The first ``most`` tokens, the last ``ends`` of which are those of the end."""
        kept = (*self[: most - ends], *self[len(self) - ends :])
        return Pair(kept, min(self.second, most - ends))
