"""Work in threads: the same on several things at once, or one thing beside the caller; work in
pieces, the long ones of which are for other threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Threads, at most: a compilation takes memory, too.
MOST_THREADS = 16


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """``[work(item) for item in items]``, several at once where there are several cores.

    It pays where most of the work is done without the interpreter, as in a driver call. Each thread
    has to make its context current. Raises what the first item that fails raises; by then nothing
    runs any more, and items that had not begun are left out.
    """
    items = list(items)
    threads = min(len(items), os.cpu_count() or 1, MOST_THREADS)
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, "urdir") as pool:
        return list(pool.map(work, items))


def completed(work: Generator[object, None, _Result]) -> _Result:
    """Do all of (the rest of) some work that comes in pieces; what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: _Result = stop.value
            return result


class Job(Generic[_Result]):
    """``work()``, done once, by the first thread that wants it done."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._future: Future[_Result] = Future()
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, be it by an exception."""
        return self._future.done()

    def run(self) -> None:
        """Do the work, or wait for the thread that does it; `result` raises its exception."""
        with self._lock:
            if self._future.done():
                return
            try:
                self._future.set_result(self._work())
            except BaseException as exc:
                self._future.set_exception(exc)

    def result(self) -> _Result:
        """What the work returned, or its exception raised; it is done here unless it was."""
        self.run()
        return self._future.result()

    def abandon(self, free: Callable[[_Result], None]) -> None:
        """Nobody wants the result: ``free`` is called with one that there is, after which none
        comes."""
        with self._lock:
            if not self._future.done():
                self._future.cancel()
            elif self._future.exception() is None:
                free(self._future.result())


#: Work in small pieces. One that would take long is yielded: another thread may do it.
Work = Generator[Job[Any] | None, None, _Result]


def elsewhere(work: Generator[object, None, _Result]) -> Work[_Result]:
    """The same work, each piece of which is for another thread."""

    def piece() -> StopIteration | None:
        try:
            next(work)
        except StopIteration as end:
            return end
        return None

    while True:
        job = Job(piece)
        try:
            yield job
        except BaseException:
            job.abandon(lambda _: None)  # once it is done: nothing runs then
            raise
        if (end := job.result()) is not None:
            result: _Result = end.value
            return result


class Task(Generic[_Result]):
    """``work()``, begun at once in a thread of its own."""

    def __init__(self, work: Callable[[], _Result], name: str) -> None:
        self._future: Future[_Result] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._thread.start()

    def _run(self, work: Callable[[], _Result]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as exc:  # raised again where the result is asked for
            self._future.set_exception(exc)

    def result(self) -> _Result:
        """What the work returned, or its exception raised, once it is done."""
        return self._future.result()

    def failed(self) -> bool:
        """Wait for the end of the work, and of its thread; whether it raised."""
        self._thread.join()
        return self._future.exception() is not None
