"""Progress bars on stderr, for work that takes more than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

_Item = TypeVar("_Item")

#: Short work shows nothing, and then there is news so often.
_DELAY_SECONDS, _TICK_SECONDS = 1.0, 0.2
_BAR = "{desc} {percentage:3.0f} % |{bar:30}| {elapsed}<{remaining}"
_CLOCK = "{desc} {elapsed}"


class Progress:
    """``label  42 % |####    | 00:03<00:04`` on a line of a terminal, which it leaves as it was;
    ``label 00:03`` where no ``total`` is known. No output if stderr is not a terminal, or if not
    ``shown``: of several processes one shows a bar.

    A thread draws it, so that time goes on while work does not come back.
    """

    def __init__(self, label: str, total: int | None = None, *, shown: bool = True) -> None:
        self._label = label
        self._total = total
        self._is_shown = shown and sys.stderr.isatty()
        self._done = 0
        self._start = time.time()
        self._ended = threading.Event()
        self._drawing = threading.Lock()
        self._bar: tqdm[Any] | None = None
        self._thread: threading.Thread | None = None

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` to what is done."""
        self._done += amount

    def reach(self, done: int, total: int) -> None:
        """So much is done of what is known only now."""
        self._done, self._total = done, total

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each done when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def note(self, line: str) -> None:
        """Print a line on stderr, in place of the bar, which comes again below it."""
        with self.cleared():
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Take the bar away while something else is printed, below which it comes again."""
        with self._drawing:
            if self._bar is not None:
                self._bar.clear()
            yield

    def __enter__(self) -> Self:
        if self._is_shown:
            self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _draw(self) -> None:
        if self._ended.wait(_DELAY_SECONDS):
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own
        bar: tqdm[Any] = tqdm(desc=self._label, leave=False, dynamic_ncols=True, delay=1e9)
        bar.start_t = self._start
        self._bar = bar
        while not self._ended.wait(_TICK_SECONDS):
            with self._drawing:
                bar.n, bar.total = self._done, self._total
                bar.bar_format = _CLOCK if self._total is None else _BAR
                bar.refresh()
        bar.clear()
        bar.close()


def until_first(label: str, items: Iterator[_Item]) -> Iterator[_Item]:
    """The items; while the first one is awaited, a terminal shows for how long."""
    with Progress(label):
        first = list(islice(items, 1))
    yield from first
    yield from items
