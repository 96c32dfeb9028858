"""The process of a loaded model: a whole server of one model, behind a Unix socket."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError, OutOfMemoryError
from urdir.model.errors import ModelError, NoRoomError
from urdir.model.serve.router.spec import ModelSpec, Serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_BACKLOG = 2048
_KILL_SECONDS = 5.0  # for killed processes to be gone
_ABORT_SECONDS = 10.0  # from the end of the router until what is open is aborted
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model's process ends; ``is_memory``: the device had no room for it."""

    cause: str
    is_memory: bool = False


class LoadError(Exception):
    """A model could not be loaded."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.is_memory = failure.is_memory


class Worker:
    """The process that serves a model at the Unix socket ``path``, begun by `start`.

    ``ended`` is set to the cause, or None after `end`. Of one event loop.
    """

    def __init__(self, spec: ModelSpec, path: Path, memory_share: float | None) -> None:
        self.path = path
        self.ended: asyncio.Future[Failure | None]
        self._ready: asyncio.Future[None]
        self._spec = spec
        self._memory_share = memory_share
        self._failure: Failure | None = None
        self._is_to_end = False

    def start(self) -> None:
        """Start the process, in the running event loop."""
        self._loop = loop = asyncio.get_running_loop()
        self.ended, self._ready = loop.create_future(), loop.create_future()
        self._control, theirs = _context.Pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.path))
            listener.listen(_BACKLOG)
            self._process = _context.Process(
                target=run_worker,
                args=(self._spec.serve, listener, theirs, self._memory_share),
                name=f"model {self._spec.name}",
            )
            # Ctrl-C in a terminal is for the router alone, also before `setsid`
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        loop.add_reader(self._control.fileno(), self._hear)
        loop.add_reader(self._process.sentinel, self._bury)

    async def ready(self) -> None:
        """Wait until the model is loaded. Raises LoadError."""
        await asyncio.wait((self._ready, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise LoadError(self.ended.result() or Failure("it was unloaded while it was loading"))

    def order(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Let it finish what is open, and end; a second time: abort that. SIGKILL: end all of its
        processes at once."""
        self._is_to_end = True
        if self.ended.done():
            return
        if number == signal.SIGKILL:
            self._kill_all()
            self._process.kill()  # before it leads a session
        else:
            self._process.terminate()

    async def end(self, seconds: float) -> None:
        """Let it finish what is open, and wait for its end, for so long; then kill it."""
        self.order()
        await asyncio.wait((self.ended,), timeout=seconds)
        if not self.ended.done():
            self.order(signal.SIGKILL)
            await self.ended

    def _hear(self) -> None:
        """Take what the process says: None once it answers, or a failure."""
        try:
            if not self._control.poll():
                return
            said = self._control.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._control.fileno())
            return
        if said is not None:
            self._failure = said
            self._loop.call_later(_KILL_SECONDS, self.order, signal.SIGKILL)  # if it does not end
        elif not self._ready.done():
            self._ready.set_result(None)

    def _bury(self) -> None:
        """The process has ended."""
        while self._failure is None and not self._control.closed and self._control.poll():
            try:
                self._failure = self._control.recv() or self._failure
            except (EOFError, OSError):
                break
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_reader(self._process.sentinel)
        is_alone = not self._kill_all()
        self._process.join()
        code = self._process.exitcode or 0
        self._control.close()
        self.path.unlink(missing_ok=True)
        usual = None if self._is_to_end else Failure(f"its process has ended: {_why(code)}")
        self._burying = self._loop.create_task(self._end_with(self._failure or usual, is_alone))

    async def _end_with(self, failure: Failure | None, is_alone: bool) -> None:
        """Wait until processes that outlived theirs are gone, with their device memory."""
        deadline = time.monotonic() + _KILL_SECONDS
        while not is_alone and time.monotonic() < deadline and self._kill_all():
            await asyncio.sleep(0.05)
        self.ended.set_result(failure)

    def _kill_all(self) -> bool:
        """Kill the processes of the session that `run_worker` begins; whether there are others than
        its leader."""
        pid = self._process.ident
        if pid is None:
            return False
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def _why(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def run_worker(
    serve: Serve, listener: socket.socket, control: Connection, memory_share: float | None
) -> None:
    """Serve a model in this process. ``control`` gets None once it answers, or a `Failure`.

    The process leads a session: all of its processes can be killed, and a terminal's signals are
    not for it. It ends with the router.
    """
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    failure = None
    try:
        serve(listener, partial(control.send, None), memory_share)
    except KeyboardInterrupt:  # ended while it was loading, or a second time
        pass
    except (ModelError, DriverError, OSError) as error:
        failure = Failure(str(error), isinstance(error, NoRoomError | OutOfMemoryError))
    except Exception as error:
        control.send(Failure(f"{type(error).__name__}: {error}"))
        raise
    if failure is not None:
        with suppress(OSError):  # the router is gone
            control.send(failure)
        sys.exit(1)


def _end_with(control: Connection) -> None:
    """End this process when the router does."""
    with suppress(EOFError, OSError):
        while True:
            control.recv()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ABORT_SECONDS)
