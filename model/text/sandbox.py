"""A chat template's rendering process, as its parent sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.foreign import one_line
from urdir.model.owner import Owner
from urdir.model.text.sandbox_worker import read_message, write_message

TIME_LIMIT = 2.0  # seconds for one rendering
_START_LIMIT = 30.0  # seconds for Python to start and import Jinja
# What Python may need to start (Windows; a shared libpython).
_INHERITED = ("SYSTEMROOT", "LD_LIBRARY_PATH")


class TemplateProcess(Owner):
    """Renders templates in a process with limits (2 s, 512 MB, 1 MB of output). It gets none of
    this process's environment, and on Linux it can open no file and start no process.

    The process starts with the first rendering or `begin`, stays for the next, and is replaced
    after it had to be killed. Not for use by two threads at once.
    """

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        """``time_limit`` is in seconds of wall clock, for one rendering."""
        self._time_limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._sent = 0  # requests to the process so far; its replies have their numbers

    def begin(self) -> None:
        """Start the process; the first rendering waits until it is ready."""
        # By path, not -m: it must start even where only this process can find urdir.
        # -I, -S: nothing of the environment, nor what a site adds to Python, runs in it.
        # A session of its own: no Ctrl-C.
        script = str(Path(__file__).with_name("sandbox_worker.py"))
        self._sent = 0
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,
        )

    def check(self, template: str) -> None:
        """Raise TemplateError for a template that does not compile; none of it is run."""
        self._answer(template, None)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. Raises TemplateError: limits, syntax, sandbox, or the template's own."""
        return self._answer(template, variables)

    def _answer(self, template: str, variables: Mapping[str, Any] | None) -> str:
        request = {"template": template, "variables": variables}
        try:
            was_idle = self._sent > 0
            reply, timed_out = self._ask(request)
            if reply is None and was_idle and not timed_out:  # it died since the last rendering
                self.close()
                reply, timed_out = self._ask(request)
        except BaseException:  # Ctrl-C: the reply to come would answer the next request
            self.close()
            raise
        if reply is None or timed_out or reply.get("fatal"):
            self.close()
        if timed_out:
            raise TemplateError(
                f"the chat template takes longer than {self._time_limit:g} s to render"
            )
        if reply is None:
            raise TemplateError("the chat template's rendering process died (out of memory?)")
        if "error" in reply:
            raise TemplateError(f"the chat template failed: {one_line(reply['error'])}")
        return str(reply["text"])

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process; closing twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close_quietly(pipe)

    def _ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
        """The reply to a request (None: the process died), and whether time ran out."""
        process = self._ready()
        self._sent += 1
        reply, timed_out = _exchange(process, {"id": self._sent, **request}, self._time_limit)
        return (None if reply is None or reply.get("id") != self._sent else reply), timed_out

    def _ready(self) -> subprocess.Popen[bytes]:
        """The process, which is waiting for a request."""
        if self._process is None:
            self.begin()
        assert self._process is not None
        if not self._sent:
            path = [os.path.abspath(folder) for folder in sys.path if folder]
            settings = {"path": path, "timezone": os.environ.get("TZ")}
            ready, _ = _exchange(self._process, settings, _START_LIMIT)
            if ready is None:
                code = self._process.poll()
                raise TemplateError(
                    f"the chat template's rendering process does not start ({code})"
                )
        return self._process


def _exchange(
    process: subprocess.Popen[bytes], request: Any, seconds: float
) -> tuple[dict[str, Any] | None, bool]:
    """Send `request`, return the reply (None: it died) and whether time ran out."""
    assert process.stdin is not None
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        write_message(process.stdin, request)
        return read_message(process.stdout), expired.is_set()
    except (OSError, ValueError):  # it died while we wrote; what it wrote is no JSON
        return None, expired.is_set()
    finally:
        timer.cancel()


def _close_quietly(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:  # unsent bytes for a process that is gone
        return
