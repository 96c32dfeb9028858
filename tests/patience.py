"""How long tests wait for what takes a moment: longer than a loaded machine needs."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds. Only a failure takes them.
PATIENCE = 120.0


def in_some_try(check: Callable[[], None], tries: int = 20) -> None:
    """Repeat a check of times until it holds: other processes lengthen them, now and then."""
    for left in reversed(range(tries)):
        try:
            return check()
        except AssertionError:
            if not left:
                raise


def wait_for(
    condition: Callable[[], object],
    seconds: float = PATIENCE,
    show: Callable[[], object] = lambda: "it did not happen in time",
) -> None:
    """Wait until ``condition`` holds. ``show`` says what is there instead."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, show()
        time.sleep(0.02)
