"""A progress bar on stderr, for work that takes more than a moment."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_DELAY_SECONDS = 0.5  # short work shows nothing
_WIDTH = 30


class Progress:
    """``label [#####     ]  42 %`` on a line of a terminal, after half a second."""

    def __init__(self, label: str, total: int, enabled: bool = True) -> None:
        self._label = label
        self._total = max(total, 1)
        self._done = 0
        self._shown: int | None = None
        self._start = time.monotonic()
        self._enabled = enabled and sys.stderr.isatty()

    def advance(self, amount: int) -> None:
        """Add ``amount`` to what is done, and redraw where a percent has changed."""
        self._done += amount
        percent = 100 * self._done // self._total
        if not self._enabled or percent == self._shown:
            return
        if time.monotonic() - self._start < _DELAY_SECONDS:
            return
        self._shown = percent
        bar = "#" * (_WIDTH * percent // 100)
        print(f"\r{self._label} [{bar:<{_WIDTH}}] {percent:3d} %", end="", file=sys.stderr)
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._shown is not None:
            print("\r" + " " * (len(self._label) + _WIDTH + 10) + "\r", end="", file=sys.stderr)
