"""Kernels compiled by other processes, into the caches on disk.

Rendering PTX holds the interpreter, and launches of a process wait while one of its threads has the
driver compile a text that is loaded itself (`compile.image_of`; 518 ms of a kernel on an H200,
2026-11-28, 2 ms while another process compiles): so would every answer of a service. The driver
keeps what it compiles for a module on disk (``CUDA_CACHE_PATH``), by the text; cubins of the linker
are kept by `CubinCache`. Loading takes milliseconds then.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedRWPair
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from urdir.driver.cache import CubinCache
from urdir.driver.device_name import DeviceName
from urdir.driver.kernel import Kernel
from urdir.driver.parallel import cores

#: Seconds in which a process starts, and in which it compiles a kernel, at most.
_START, _EACH = 20.0, 10.0
_PROGRAM = "urdir.driver.compiler"
#: What it imports: kernels, and what renders them.
_MODULES = ("urdir.ptxgen.kernels", "urdir.ptxgen.render.jinja")
#: What compiles launches nothing. Fourteen contexts that are made at once with one queue each take
#: 0.5 s, with as many as usual 1.9 s (H200, CUDA 13.0). What is to fork has one thread: numpy
#: starts some on import.
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Processes, at most.
_MOST = 20
#: Kernels that wait for a process, of each: with fewer it may soon have none.
_QUEUED = 4
#: The answer for a kernel that is compiled; the first one says that kernels may come.
DONE = b"1"
_LENGTH = struct.Struct("<I")


class Compilers:
    """``most`` processes that compile kernels for ``device``, forked by a program that has imported
    ``modules``, and those of packages, without those that are not found. It starts with the first
    kernel, or when told to `begin`; the others with the first kernel, or when told to `fork`.

    Cubins go to the cache in ``folder`` (None: only what the driver keeps is kept). A process takes
    as much memory of a GPU as a context does (0.5 GB of an H200) until `close`. A failure costs
    time alone: the kernel is compiled when it is loaded. Thread-safe.
    """

    def __init__(
        self,
        device: str,
        folder: Path | None,
        limit: int | None,
        most: int,
        modules: Sequence[str] = _MODULES,
    ) -> None:
        self._command = [
            sys.executable,
            "-P",
            "-m",
            _PROGRAM,
            device,
            str(folder or ""),
            str(limit or 0),
            *modules,
        ]
        self._most = most
        self._threads = ThreadPoolExecutor(most, "compilers")
        self._idle = SimpleQueue[_Process | None]()
        self._has_forked = False
        self._lock = threading.Lock()  # of what follows
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # to the program
        self._processes: list[_Process] = []
        self._results: dict[str, Future[bool]] = {}
        self._left = 0  # of the kernels
        self._is_closed = False
        self._ended = 0  # of the processes

    def compile(self, kernels: Mapping[str, Kernel]) -> bool:
        """Compile kernels by their keys, each once, and wait; whether all succeeded."""
        if kernels:
            self.fork()
        with self._lock:
            if self._is_closed:
                return False
            for key, kernel in kernels.items():
                if key not in self._results:
                    self._results[key] = self._threads.submit(self._compiled, kernel)
                    self._left += 1
            results = [self._results[key] for key in kernels]
        done = [_succeeded(result) for result in results]
        return all(done)

    def knows(self, key: str) -> bool:
        """Whether a kernel was to be compiled."""
        return key in self._results

    @property
    def is_short(self) -> bool:
        """Whether they have begun, and few kernels wait for one of them."""
        return self._has_forked and self._left < (1 + _QUEUED) * self._most

    def begin(self) -> None:
        """Start the program, which imports: processes will be needed. Idempotent."""
        with self._lock, suppress(OSError):
            if self._is_closed or self._control is not None:
                return
            self._control, theirs = socket.socketpair()
            with theirs:
                self._program = subprocess.Popen(
                    self._command,
                    env=os.environ | _ENVIRONMENT | {"PYTHONPATH": _path()},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # which `close` ends
                )

    def fork(self, most: int | None = None) -> None:
        """Start the processes, up to another number: kernels will come. Idempotent."""
        self.begin()
        with self._lock, ExitStack() as theirs:
            if self._is_closed or self._has_forked:
                return
            self._has_forked = True
            self._most = min(self._most, most or self._most)
            numbers: list[int] = []
            with suppress(OSError):  # what is there has ended then
                for _ in range(self._most):
                    ours, other = socket.socketpair()
                    self._processes.append(_Process(ours))
                    numbers.append(theirs.enter_context(other).fileno())
                if self._control is not None:
                    socket.send_fds(self._control, [b"\0"], numbers)
            self._ended = self._most - len(self._processes)
            for process in self._processes:
                self._threads.submit(self._await, process)
            if not self._processes:
                self._idle.put(None)

    def close(self) -> None:
        """End the processes; what waits for them goes on. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._program is not None and self._program.returncode is None:
                os.killpg(self._program.pid, signal.SIGKILL)
                self._program.wait()
            for process in self._processes:
                process.end()
        self._threads.shutdown(cancel_futures=True)
        for each in (*self._processes, self._control):
            if each is not None:
                each.close()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _compiled(self, kernel: Kernel) -> bool:
        """Have a process compile a kernel."""
        if (process := self._running()) is None:
            self._one_less()
            return False
        try:
            with _ended_after(_EACH, process):
                return process.compile(kernel)
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            return False
        finally:
            self._idle.put(process)
            self._one_less()

    def _await(self, process: _Process) -> None:
        """Wait until a process has opened the device."""
        with suppress(OSError), _ended_after(_START, process):
            process.wait()
        self._idle.put(process)

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1

    def _running(self) -> _Process | None:
        """Wait for an idle process; None if all have ended. One that has ended is not put back: it
        would be the first to be idle again, and each kernel would fail."""
        while (process := self._idle.get()) is None or process.has_ended:
            with self._lock:
                self._ended += process is not None
                if self._ended >= self._most:
                    self._idle.put(None)  # for the others that wait
                    return None
        return process


def compilers_for(name: str, cache_folder: Path | None) -> Compilers | None:
    """What compiles for a device that is not open yet, see `Device.begin_compilers`; its program
    has begun, which takes as long as a device to be opened. None where kernels were compiled
    before, or will not be."""
    if cache_folder is None or DeviceName.parse(name).kind == "emulator" or not most_compilers():
        return None
    with suppress(OSError):  # opening the device says so
        if CubinCache(cache_folder).is_empty:
            compilers = Compilers(name, cache_folder, None, most_compilers())
            compilers.begin()
            return compilers
    return None


def most_compilers() -> int:
    """How many processes compile: seven on eight cores."""
    return min(cores() * 7 // 8, _MOST) if hasattr(os, "fork") else 0


class _Process:
    """A process that compiles, at the other end of a socket."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._pipe = ours.makefile("rwb")

    @property
    def has_ended(self) -> bool:
        """Whether it has closed its end."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait(self) -> None:
        """Wait until it can compile, or has ended. Raises OSError."""
        self._pipe.read(1)

    def compile(self, kernel: Kernel) -> bool:
        """Have it compile a kernel; whether it has. Raises OSError if it has ended, and what
        pickling raises."""
        write(self._pipe, kernel)
        return self._pipe.read(1) == DONE

    def end(self) -> None:
        """End what waits for it; it ends once it hears of that. From any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):  # of what could not be written
            self._pipe.close()
        self._socket.close()


@contextmanager
def _ended_after(seconds: float, process: _Process) -> Iterator[None]:
    """End a process that takes longer."""
    timer = threading.Timer(seconds, process.end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _succeeded(result: Future[bool]) -> bool:
    """Wait for a kernel (`concurrent.futures.wait` never returns where a pool's end cancels it)."""
    try:
        return result.result()
    except CancelledError:
        return False


def write(pipe: BufferedRWPair, kernel: Kernel) -> None:
    """Send a kernel to such a process."""
    data = pickle.dumps(kernel)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read(pipe: BufferedRWPair) -> Any:
    """The next kernel; None at the end. Raises what a class that is not found here raises."""
    head = pipe.read(_LENGTH.size)
    return pickle.loads(pipe.read(*_LENGTH.unpack(head))) if head else None
