"""Ctrl-C while Python imports: held back until the import machinery has let go of its locks.

CPython forgets an interrupt, and keeps its lock of all imports for ever, where the signal comes
between two lines of that machinery; other threads that import then wait without an end. Seen with
3.11 in one of thirty interrupts while a model is opened. Before 3.12 it also makes a RuntimeError
of one that comes while a class names its attributes.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_MACHINERY = "<frozen importlib."
_PAUSE_SECONDS = 0.01


def spare_imports() -> None:
    """Answer Ctrl-C so from now on; where it is ignored, as in the background, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    code = None if frame is None else frame.f_code
    if code is None or not (
        code.co_filename.startswith(_MACHINERY) or code.co_name == "__set_name__"
    ):
        raise KeyboardInterrupt
    again = threading.Timer(_PAUSE_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
