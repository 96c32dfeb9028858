"""The same work on several things at once, in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
