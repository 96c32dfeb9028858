"""Event loops of servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
with suppress(ImportError):  # Windows
    from uvloop import new_event_loop as _new_loop

_Result = TypeVar("_Result")


def run_in_loop(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``work`` in a new event loop: uvloop's, where it is installed."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(work)
