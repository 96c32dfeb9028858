"""Parent side of a process for untrusted text."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from urdir.model.owner import Owner
from urdir.model.text.sandbox_main import Messages

_START_LIMIT = 30.0  # seconds for Python and the worker to start
_MOST_WALL = 5  # times a limit, where the process has not had that time of a processor
# Environment variables that Python may need to start (Windows; a shared libpython).
_INHERITED = ("SYSTEMROOT", "LD_LIBRARY_PATH")


class SandboxProcess(Owner):
    """A Python process with a worker of this folder (`sandbox_main`) and an empty environment.

    It starts at once, concurrently with the parent. ``descriptors`` are inherited. Not thread-safe.
    """

    def __init__(self, worker: str, descriptors: Sequence[int] = ()) -> None:
        # By path, not -m: it must start even if only this process can find urdir.
        # -I, -S: ignore the environment and site packages.
        # Its own session: no Ctrl-C.
        script = str(Path(__file__).with_name("sandbox_main.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,
            pass_fds=tuple(descriptors),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.messages = Messages(self._process.stdout, self._process.stdin)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def prepare(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send the worker its settings; its first reply, or None if it does not start."""
        path = [os.path.abspath(folder) for folder in sys.path if folder]
        return self.exchange({"path": path, **settings}, _START_LIMIT)[0]

    def exchange(
        self, request: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, Any] | None, bool]:
        """Send a request; the reply (None: the process died), and whether it timed out: it has used
        a processor for that time (on Linux; where others use them, too, that takes longer)."""
        done, expired = threading.Event(), threading.Event()
        before, latest = self._used_seconds(), time.monotonic() + _MOST_WALL * seconds

        def watch() -> None:
            left = seconds
            while not done.wait(left):
                left = min(seconds - (self._used_seconds() - before), latest - time.monotonic())
                if left <= 0:
                    expired.set()
                    self._process.kill()
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            self.messages.write(request)
            return self.messages.read(), expired.is_set()
        except (OSError, ValueError):  # it died during the write; its reply is not JSON
            return None, expired.is_set()
        finally:
            done.set()
            watching.join()

    def _used_seconds(self) -> float:
        """What the process has used of processors, or the time where the system does not say."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return time.monotonic()
        user, system = map(int, stat.rpartition(")")[2].split()[11:13])
        return (user + system) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self.messages.writer, self.messages.reader):
            with contextlib.suppress(OSError):  # unsent bytes for an ended process
                pipe.close()
