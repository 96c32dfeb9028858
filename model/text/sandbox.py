"""Parent side of the chat template rendering process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.foreign import one_line
from urdir.model.owner import Owner
from urdir.model.text.sandbox_process import SandboxProcess

TIME_LIMIT = 2.0  # seconds per rendering


class TemplateProcess(Owner):
    """Renders templates in a process with limits: 2 s, 512 MB, 1 MB of output.

    The process gets none of this process's environment; on Linux it can open no file and start no
    process. It starts with the first rendering or `begin`, is reused, and is replaced after being
    killed. Not thread-safe.
    """

    def __init__(self, time_limit: float = TIME_LIMIT) -> None:
        """``time_limit`` is in seconds of a processor, per rendering; see `SandboxProcess`."""
        self._time_limit = time_limit
        self._process: SandboxProcess | None = None
        self._sent = 0  # number of requests so far; replies repeat the number

    def begin(self) -> None:
        """Start the process; the first rendering waits until it is ready."""
        self._sent = 0
        self._process = SandboxProcess("template_worker")

    def check(self, template: str) -> None:
        """Compile a template without running it; TemplateError if it is invalid."""
        self._answer(template, None)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template. Raises TemplateError: limits, syntax, sandbox, or raised by the
        template."""
        return self._answer(template, variables)

    def _answer(self, template: str, variables: Mapping[str, Any] | None) -> str:
        request = {"template": template, "variables": variables}
        try:
            was_idle = self._sent > 0
            reply, timed_out = self._ask(request)
            if reply is None and was_idle and not timed_out:  # it died after the last rendering
                self.close()
                reply, timed_out = self._ask(request)
        except BaseException:  # Ctrl-C: the pending reply would be taken for the next request's
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
        """Process id, or None before it starts."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
        """The reply to a request (None: the process died), and whether it timed out."""
        process = self._ready()
        self._sent += 1
        reply, timed_out = process.exchange({"id": self._sent, **request}, self._time_limit)
        return (None if reply is None or reply.get("id") != self._sent else reply), timed_out

    def _ready(self) -> SandboxProcess:
        """The process, waiting for a request."""
        if self._process is None:
            self.begin()
        assert self._process is not None
        if not self._sent and self._process.prepare({"timezone": os.environ.get("TZ")}) is None:
            code = self._process.exit_code
            raise TemplateError(f"the chat template's rendering process does not start ({code})")
        return self._process
