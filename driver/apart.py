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
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from urdir.driver.kernel import Kernel

#: Seconds in which a process starts, and in which it compiles a kernel, at most.
_START, _EACH = 20.0, 10.0
_PROGRAM = "urdir.driver.compiler"
#: What compiles launches nothing. Fourteen contexts that are made at once with one queue each take
#: 0.5 s, with as many as usual 1.9 s (H200, CUDA 13.0).
_FEW_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
#: Kernels that wait for a process, of each: with fewer it may soon have none.
_QUEUED = 4
#: The answer for a kernel that is compiled.
DONE = b"1"
_LENGTH = struct.Struct("<I")


class Compilers:
    """``most`` processes that compile kernels for ``device``; all start with the first kernel, or
    when told to `begin`; each imports ``modules`` at first, without those that are not found.

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
        modules: Sequence[str] = (),
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
        self._idle = SimpleQueue[subprocess.Popen[bytes] | None]()
        self._begun: float | None = None
        self._lock = threading.Lock()  # of what follows
        self._processes: list[subprocess.Popen[bytes]] = []
        self._results: dict[str, Future[bool]] = {}
        self._left = 0  # of the kernels
        self._is_closed = False
        self._ended = 0  # of the processes

    def compile(self, kernels: Mapping[str, Kernel]) -> bool:
        """Compile kernels by their keys, each once, and wait; whether all succeeded."""
        with self._lock:
            if self._is_closed:
                return False
            if kernels:
                self._begin()
            for key, kernel in kernels.items():
                if key not in self._results:
                    self._results[key] = self._threads.submit(self._compiled, kernel)
                    self._left += 1
            results = [self._results[key] for key in kernels]
        done = [_succeeded(result) for result in results]
        return all(done)

    @property
    def is_short(self) -> bool:
        """Whether they have begun, and few kernels wait for one of them."""
        return self._begun is not None and self._left < (1 + _QUEUED) * self._most

    def begin(self) -> None:
        """Start the processes: kernels will come."""
        with self._lock:
            if not self._is_closed:
                self._begin()

    def close(self) -> None:
        """End the processes; what waits for them goes on. Idempotent."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begin(self) -> None:
        if self._begun is not None:
            return
        self._begun = time.monotonic()
        for _ in range(self._most):  # each takes milliseconds of a thread
            self._threads.submit(lambda: self._idle.put(self._start()))

    def _compiled(self, kernel: Kernel) -> bool:
        """Have a process compile a kernel."""
        if (process := self._running()) is None:
            self._one_less()
            return False
        assert self._begun is not None
        starting = max(0.0, self._begun + _START - time.monotonic())
        timer = threading.Timer(_EACH + starting, process.kill)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            write(process.stdin, kernel)
            return process.stdout.read(1) == DONE
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            return False
        finally:
            timer.cancel()
            self._idle.put(process)
            self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1

    def _running(self) -> subprocess.Popen[bytes] | None:
        """Wait for an idle process; None if all have ended. One that has ended is not put back: it
        would be the first to be idle again, and each kernel would fail."""
        while (process := self._idle.get()) is None or process.poll() is not None:
            with self._lock:
                self._ended += 1
                if self._ended >= self._most:
                    self._idle.put(None)  # for the others that wait
                    return None
        return process

    def _start(self) -> subprocess.Popen[bytes] | None:
        environment = os.environ | _FEW_QUEUES
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        with self._lock, suppress(OSError):
            if not self._is_closed:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=subprocess.DEVNULL,
                )
                self._processes.append(process)
                return process
        return None


def _succeeded(result: Future[bool]) -> bool:
    """Wait for a kernel (`concurrent.futures.wait` never returns where a pool's end cancels it)."""
    try:
        return result.result()
    except CancelledError:
        return False


def write(pipe: IO[bytes], kernel: Kernel) -> None:
    """Send a kernel to such a process."""
    data = pickle.dumps(kernel)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read(pipe: IO[bytes]) -> Any:
    """The next kernel; None at the end. Raises what a class that is not found here raises."""
    head = pipe.read(_LENGTH.size)
    return pickle.loads(pipe.read(*_LENGTH.unpack(head))) if head else None
