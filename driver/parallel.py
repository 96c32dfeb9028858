"""Threads: parallel maps, background tasks, and work in pieces that other threads may run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Maximum number of threads: a compilation takes memory too.
MOST_THREADS = 16
#: Operations of a piece of work, each of which takes less than 0.1 ms.
PIECE = 8


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on Windows and macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], count: int | None = None
) -> list[_Result]:
    """``[work(item) for item in items]``, in threads if there are several cores.

    It pays if most of the work is outside the interpreter, as in a driver call. Each thread must
    make its context current. Raises the exception of the first item that fails; by then no thread
    runs, and items that had not started are skipped.

    With their ``count``, items are made one after another in this thread, while others are worked
    on.
    """
    if count is None:
        items = list(items)
        count = len(items)
    threads = min(count, cores(), MOST_THREADS)
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, "urdir") as pool:
        return list(pool.map(work, items))


def completed(work: Generator[object, None, _Result]) -> _Result:
    """Run the rest of work that comes in pieces; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            result: _Result = stop.value
            return result


def pieces(items: Iterable[_Item], work: Callable[[_Item], object]) -> Generator[None]:
    """``work`` of each item, a few in a piece: to go on with it costs as much as one."""
    for number, item in enumerate(items, 1):
        work(item)
        if not number % PIECE:
            yield


class Job(Generic[_Result]):
    """``work()``, run once by the first thread that needs it. ``waits``: it mostly waits for other
    processes, so that several may run at once."""

    def __init__(self, work: Callable[[], _Result], waits: bool = False) -> None:
        self._work = work
        self.waits = waits
        self._future: Future[_Result] = Future()
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with a result or an exception."""
        return self._future.done()

    def run(self) -> None:
        """Run the work, or wait for the thread that runs it; `result` raises its exception."""
        with self._lock:
            if self._future.done():
                return
            try:
                self._future.set_result(self._work())
            except BaseException as exc:
                self._future.set_exception(exc)

    def result(self) -> _Result:
        """The result of the work, run here if necessary; raises its exception."""
        self.run()
        return self._future.result()

    def abandon(self, free: Callable[[_Result], None]) -> None:
        """Give up the result: ``free`` is called with an existing one, and none is produced
        afterwards."""
        with self._lock:
            if not self._future.done():
                self._future.cancel()
            elif self._future.exception() is None:
                free(self._future.result())


#: Work in small pieces. A long piece is yielded: another thread may run it.
Work = Generator[Job[Any] | None, None, _Result]


def elsewhere(
    work: Generator[object, None, _Result], wait: Callable[[], object] = lambda: None
) -> Work[_Result]:
    """The same work as one job for another thread, which calls ``wait`` before every piece."""

    def run() -> _Result:
        while True:
            wait()
            try:
                next(work)
            except StopIteration as end:
                result: _Result = end.value
                return result

    job = Job(run)
    try:
        yield job
    except BaseException:
        job.abandon(lambda _: None)  # after it is done, nothing runs
        raise
    return job.result()


class Task(Generic[_Result]):
    """``work()``, started at once in a separate thread."""

    def __init__(self, work: Callable[[], _Result], name: str) -> None:
        self._future: Future[_Result] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._thread.start()

    def _run(self, work: Callable[[], _Result]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as exc:  # raised again by `result`
            self._future.set_exception(exc)

    def result(self) -> _Result:
        """Wait for the result; raises the exception of the work."""
        return self._future.result()

    def failed(self) -> bool:
        """Wait for the end of the work and its thread; whether it raised."""
        self._thread.join()
        return self._future.exception() is not None
