"""A process for work on strangers' text, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from urdir.model.owner import Owner
from urdir.model.text.sandbox_main import Messages

_START_LIMIT = 30.0  # seconds for Python to start and for the worker to prepare
# What Python may need to start (Windows; a shared libpython).
_INHERITED = ("SYSTEMROOT", "LD_LIBRARY_PATH")


class SandboxProcess(Owner):
    """Python with a worker of this folder (`sandbox_main`), and nothing of this process's
    environment. It starts at once, beside what its parent does. ``descriptors`` are inherited.

    Not for use by two threads at once.
    """

    def __init__(self, worker: str, descriptors: Sequence[int] = ()) -> None:
        # By path, not -m: it must start even where only this process can find urdir.
        # -I, -S: nothing of the environment, nor what a site adds to Python, runs in it.
        # A session of its own: no Ctrl-C.
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
        """Of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def prepare(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send the worker its settings; its first reply, None where it does not start."""
        path = [os.path.abspath(folder) for folder in sys.path if folder]
        return self.exchange({"path": path, **settings}, _START_LIMIT)[0]

    def exchange(
        self, request: Mapping[str, Any], seconds: float
    ) -> tuple[dict[str, Any] | None, bool]:
        """Send a request; the reply (None: the process died), and whether time ran out."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(seconds, expire)
        timer.start()
        try:
            self.messages.write(request)
            return self.messages.read(), expired.is_set()
        except (OSError, ValueError):  # it died while we wrote; what it wrote is no JSON
            return None, expired.is_set()
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process; closing twice does nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self.messages.writer, self.messages.reader):
            with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                pipe.close()
