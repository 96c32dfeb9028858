"""How more answers than a step has rows take turns, on the host as on the device (`Advance`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
#: All of this many answers always have a row: a launch may have several of their steps.
ALL_GO_ON = 4


@dataclass(frozen=True, slots=True)
class Turns(Generic[T]):
    """Those that are ``waiting``, without a row in a step, at most as many as the step has rows.
    After the step they take the places of the rows from ``first`` on, around the end; these wait
    during the next step, whose first one to leave comes after them. So all leave in turn, each for
    one step."""

    waiting: tuple[T, ...]
    first: int = 0

    @classmethod
    def of(cls, all_of_them: Sequence[T], rows: int) -> tuple[list[T], Turns[T]]:
        """The rows of a first step, and the turns. The first of all wait, the next leave next."""
        count = len(all_of_them) - rows
        return list(all_of_them[count:]), cls(tuple(all_of_them[:count]))

    def next(self, rows: Sequence[T]) -> tuple[list[T], Turns[T]]:
        """The rows of the next step, and the turns in it."""
        rows, waiting, count = list(rows), list(self.waiting), len(rows)
        for number, comes in enumerate(self.waiting):
            row = (self.first + number) % count
            waiting[number], rows[row] = rows[row], comes
        return rows, Turns(tuple(waiting), (self.first + len(waiting)) % count)

    def in_order(self, rows: Sequence[T]) -> list[T]:
        """Rows and those that wait, by who leaves first."""
        return [*rows[self.first :], *rows[: self.first], *self.waiting]
