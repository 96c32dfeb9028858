"""Serve with HTTP in processes of its own, apart from the engine's.

    urdir serve --api-workers 2       takes signals, waits
      engine's process                scheduler, device, constraints' processes
        front end 0, front end 1      HTTP, templates, tokens and text, answers' formats

All front ends accept from one listening socket. Each has a Unix socket to the engine's process,
whose end tells either side that the other is gone: a front end that ends is replaced, and its
answers are cancelled; when the engine's process ends, open answers end with an error.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from urdir.model.serve.apart.settings import Settings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_context = multiprocessing.get_context("spawn")


def serve_apart(settings: Settings, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish open ones; a second one aborts them,
    a third one ends all processes at once.

    Raises the error that ends the engine's process, KeyboardInterrupt after a second signal, or
    after the first one before anything is served.
    """
    control, theirs = _context.Pipe()
    process = _context.Process(target=_run_engine, args=(settings, listener, theirs), name="engine")
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # also in the new process, from its start
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, usual)
    theirs.close()
    listener.close()
    signals = _Signals(control, settings.greet)
    handlers = [(number, signal.signal(number, signals.take)) for number in _SIGNALS]
    try:
        signals.wait(process)
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
        control.close()
        if not signals.has_ended:
            process.kill()  # front ends end with it
        process.join()


def _run_engine(settings: Settings, listener: socket.socket, control: Connection) -> None:
    """What the engine needs is imported in its process alone."""
    from urdir.model.serve.apart.engine_process import run_engine

    run_engine(settings, listener, control)


class _Signals:
    """Passes signals on as orders to the engine's process. ``greet`` is called once it serves: a
    signal after the greeting finds that."""

    def __init__(self, control: Connection, greet: Callable[[str, int], None]) -> None:
        self._control = control
        self._greet = greet
        self._orders = 0
        self._serves = False
        self.has_ended = False

    def wait(self, process: SpawnProcess) -> None:
        """Wait for the end of the process. Raises its error, and those of the greeting."""
        while isinstance(said := self._received(process), tuple):
            self._serves = True
            self._greet(*said)
        self.has_ended = self._serves
        if said is not None:
            raise said.cause

    def _received(self, process: SpawnProcess) -> Any:
        """The next message of the process. Raises ModelError if it has ended without one."""
        try:
            return self._control.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise ModelError(f"the engine's process has ended: {_why(process)}") from None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if not self._serves or self._orders == 2:
            raise KeyboardInterrupt
        if not self._orders and number == signal.SIGINT:
            print("\nfinishing open requests; press Ctrl-C again to abort them", file=sys.stderr)
        self._orders += 1
        with suppress(OSError):  # it has ended
            self._control.send("drain" if self._orders == 1 else "abort")


def _why(process: SpawnProcess) -> str:
    code = process.exitcode or 0
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
