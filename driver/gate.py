"""Work that can wait, of other threads, pauses while one is in a hurry."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

#: Seconds for which a gate is closed together before it is open as long.
_MOST = 0.04


class Gate:
    """Threads that work for later wait here between small pieces while it is closed.

    Only those that have to (`minded`): a thread that needs the same work now does it without
    waiting. It opens by itself. Whatever is asked, it is closed for at most ``most`` seconds
    together; each second in which it is open allows another one: so work goes on however often it
    is closed. ``clock`` is in seconds. Thread-safe.
    """

    def __init__(self, most: float = _MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = self._spare = most  # seconds for which it may still be closed, as of the end
        self._clock = clock
        self._end = clock()  # when it opens, or was opened
        self._changed = threading.Condition()
        self._threads = threading.local()
        self._turns = threading.Lock()

    @property
    def left(self) -> float:
        """Seconds until it opens; 0 if it is open."""
        return max(0.0, self._end - self._clock())

    def close(self, seconds: float) -> None:
        """Close it for some seconds from now, if it is not for longer already."""
        with self._changed:
            now, end = self._clock(), self._end
            self._settle(now)
            seconds = min(max(seconds, end - now), self._spare)
            self._end = now + seconds
            self._spare -= seconds

    def open(self) -> None:
        """Let threads go on."""
        if self.left:
            with self._changed:
                self._settle(self._clock())
                self._changed.notify_all()

    @contextmanager
    def minded(self) -> Iterator[None]:
        """Within, this thread waits where it is closed."""
        self._threads.waits = True
        try:
            yield
        finally:
            self._threads.waits = False

    def work(self, do: Callable[[], None]) -> None:
        """Do something in this thread, once it is open and while it is."""
        with self.minded():
            self.wait()
            do()

    @property
    def _is_minded(self) -> bool:
        return getattr(self._threads, "waits", False)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, no other thread that minds it has a turn, which begins once it is open: they
        would have passed it, and go on one after the other where something else holds them up."""
        with self._turns if self._is_minded else nullcontext():
            self.wait()
            yield

    def wait(self) -> None:
        """Return once it is open, in a thread that minds it; at once in others."""
        if self.left and self._is_minded:
            with self._changed:
                while left := self.left:
                    self._changed.wait(left)

    def _settle(self, now: float) -> None:
        """Open it, and count for how long it was closed or open."""
        if now < self._end:
            self._spare += self._end - now
        else:
            self._spare = min(self._most, self._spare + now - self._end)
        self._end = now
