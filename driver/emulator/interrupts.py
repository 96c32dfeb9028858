"""Ctrl-C while the emulated GPU works: noticed once the call is over, as with the real driver."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back within, then hand it to the handler that was there.

    A kernel stopped in the middle would leave the emulated device in a state that no GPU can have.
    A second Ctrl-C is not held back. Only the main thread gets signals; others pass through.
    """
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            former(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if held:
            former(*held[0])
