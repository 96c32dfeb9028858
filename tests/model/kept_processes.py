"""Processes that render chat templates, kept from one test to the next: most of the time of a short
answer by the command line went into starting one (0.2 s, for the imports of Jinja)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from urdir.model.text import chat, sandbox
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.sandbox_process import SandboxProcess

#: Idle processes, each with the number of its requests, by the time zone that they were given.
_idle: defaultdict[str | None, list[tuple[SandboxProcess, int]]] = defaultdict(list)
#: Idle processes of a time zone, at most.
_MOST = 4


class KeptTemplateProcess(TemplateProcess):
    """Takes a process that an earlier one has left, and leaves it to later ones where the last
    request was answered."""

    _is_sound = False

    def begin(self) -> None:
        """Take an idle process, or start one."""
        self._zone = os.environ.get("TZ")
        while idle := _idle[self._zone]:
            process, sent = idle.pop()
            if process.exit_code is None:
                self._process, self._sent = process, sent
                return
            process.close()
        super().begin()

    def _ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
        self._is_sound = False
        reply, timed_out = super()._ask(request)
        self._is_sound = reply is not None and not timed_out and not reply.get("fatal")
        return reply, timed_out

    def close(self) -> None:
        """Leave the process to others, or end it. Idempotent."""
        if self._process is not None and self._is_sound and len(_idle[self._zone]) < _MOST:
            _idle[self._zone].append((self._process, self._sent))
            self._process, self._is_sound = None, False
        super().close()


@contextmanager
def kept() -> Iterator[None]:
    """Chat templates use such processes; at the end all are ended."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (chat, sandbox):
            patch.setattr(module, "TemplateProcess", KeptTemplateProcess)
        yield
    while _idle:
        for process, _ in _idle.popitem()[1]:
            process.close()
