"""Starts constraint processes: by forking one that has the vocabulary, or separately on systems
without fork.
"""

from __future__ import annotations

import base64
import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from urdir.model.errors import ModelError
from urdir.model.foreign import one_line
from urdir.model.owner import Owner
from urdir.model.text.constraint_process import LIMITS, ConstraintProcess, ProcessGoneError
from urdir.model.text.sandbox_process import SandboxProcess
from urdir.model.text.tokenizer import Tokenizer

_GIVEN_UP = 30.0  # seconds of wall clock for a reply: the process may have been stopped
_CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


class ConstraintStarter(Owner):
    """Starts processes that have the vocabulary of ``tokenizer``. Thread-safe.

    The first start takes about a second for 150,000 tokens. With fork, further starts take
    milliseconds, and one process is always started in advance.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._source: _Source | None = None
        self._spare: ConstraintProcess | None = None

    def begin(self) -> None:
        """Wait until processes can be started. Raises ModelError."""
        with self._lock:
            self._opened()

    def start(self) -> ConstraintProcess:
        """A process that waits for a grammar. Raises ModelError."""
        with self._lock:
            spare, self._spare = self._spare, None
            process = spare if spare is not None and _is_ready(spare) else self._started()
            source = self._opened()
            if source.is_quick:
                with suppress(ProcessGoneError):  # the next start reports it
                    self._spare = source.start()
            return process

    def close(self) -> None:
        """End the processes without a constraint. Idempotent."""
        with self._lock:
            self._close()

    def _started(self) -> ConstraintProcess:
        for _ in range(2):  # the source may have been killed
            with suppress(ProcessGoneError):
                process = self._opened().start()
                if _is_ready(process):
                    return process
            self._close()
        raise ModelError("constrained output: its processes do not start")

    def _opened(self) -> _Source:
        if self._source is None:
            kind = _Forks if _CAN_FORK else _Spawns
            self._source = kind(_settings(self._tokenizer))
        return self._source

    def _close(self) -> None:
        owners, self._spare, self._source = (self._spare, self._source), None, None
        for owner in owners:
            if owner is not None:
                owner.close()


class _Source(Protocol):
    is_quick: bool

    def start(self) -> ConstraintProcess: ...
    def close(self) -> None: ...


class _Forks(Owner):
    """A process with the vocabulary that forks on request."""

    is_quick = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = SandboxProcess("constraint_worker", [theirs.fileno()])
            try:
                _prepare(self._process, {**settings, "control": theirs.fileno()})
            except BaseException:
                self.close()
                raise

    def start(self) -> ConstraintProcess:
        """Fork a process, which may not be ready yet. Raises ProcessGoneError."""
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # buffers masks
        process = ConstraintProcess(_SocketPipe(ours))
        try:
            with theirs:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        except OSError:
            process.close()
            raise ProcessGoneError from None
        return process

    def close(self) -> None:
        """End the source; processes forked from it continue."""
        self._control.close()
        self._process.close()


class _Spawns:
    """Starts a Python process and loads the vocabulary for each constraint."""

    is_quick = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {**settings, "control": None}

    def start(self) -> ConstraintProcess:
        process = SandboxProcess("constraint_worker")
        try:
            _prepare(process, self._settings)
        except BaseException:
            process.close()
            raise
        return ConstraintProcess(_ProcessPipe(process))

    def close(self) -> None:
        """Nothing is open."""


class _SocketPipe:
    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(_GIVEN_UP)
        self._socket = sock
        self._reader = sock.makefile("rb", buffering=1 << 16)  # a few masks at once
        self._events = select.poll()
        self._events.register(sock, 0)  # it reports that the other end is closed

    @property
    def is_gone(self) -> bool:
        return self._socket.fileno() < 0 or bool(self._events.poll(0))

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._reader.read(size)
        except (OSError, ValueError):  # timeout; this end is closed
            data = b""
        if len(data) < size:
            self.close()
            raise ProcessGoneError
        return data

    def write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.close()
            raise ProcessGoneError from None

    def close(self) -> None:
        with suppress(OSError):  # also wakes a reading thread
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.close()


class _ProcessPipe:
    def __init__(self, process: SandboxProcess) -> None:
        self._process = process

    @property
    def is_gone(self) -> bool:
        return self._process.exit_code is not None

    def read(self, size: int) -> bytes:
        try:
            data = self._process.messages.reader.read(size)
        except (OSError, ValueError):
            data = b""
        if len(data) < size:
            self.close()
            raise ProcessGoneError
        return data

    def write(self, data: bytes) -> None:
        try:
            self._process.messages.writer.write(data)
            self._process.messages.writer.flush()
        except (OSError, ValueError):
            self.close()
            raise ProcessGoneError from None

    def close(self) -> None:
        self._process.close()


def _is_ready(process: ConstraintProcess) -> bool:
    with suppress(ProcessGoneError):
        process.wait_until_ready()
        return True
    process.close()
    return False


def _settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The vocabulary in the form that a worker takes."""
    ids = range(tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in ids]
    ends = tokenizer.end_ids
    return {
        "lengths": [len(token) for token in tokens],
        "bytes": base64.b64encode(b"".join(tokens)).decode(),
        "special": [token for token in ids if tokenizer.is_markup(token) or token in ends],
        "ends": sorted(ends),
        "bos": tokenizer.bos_id,
        "limits": LIMITS,
    }


def _prepare(process: SandboxProcess, settings: Mapping[str, Any]) -> None:
    """Send a process its vocabulary. Raises ModelError."""
    reply = process.prepare(settings)
    if reply is None:
        raise ModelError(f"constrained output: its process does not start ({process.exit_code})")
    if "error" in reply:
        raise ModelError(f"constrained output: {one_line(reply['error'])}")
