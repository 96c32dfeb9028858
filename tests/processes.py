"""Processes that tests start: each leads a group, and is ended with its group and its pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.patience import PATIENCE


def start(command: Sequence[str], **how: Any) -> subprocess.Popen[str]:
    """Start a process that leads a session, so that `kill` reaches all that it starts."""
    return subprocess.Popen(command, text=True, start_new_session=True, **how)


def start_python(*words: str, **how: Any) -> subprocess.Popen[str]:
    """`start` this Python."""
    return start([sys.executable, *words], **how)


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process of `start` and those of its session, and close its pipes. Idempotent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):  # what was not written yet
                pipe.close()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a process that ends, with all that it has started."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out or "", err or ""


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill a process at the end."""
    try:
        yield process
    finally:
        kill(process)


@contextmanager
def beginning(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process if it does not begin as expected."""
    try:
        yield
    except BaseException:
        kill(process)
        raise
