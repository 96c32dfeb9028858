"""Entry point of processes for untrusted text (parent side: `sandbox_process`).

    python -I -S sandbox_main.py WORKER

loads WORKER.py of this folder by path: nothing of urdir is imported. `serve` of that module then
prepares, restricts the process (`sandbox_limits`), and answers requests until the parent closes the
pipe.

Messages are JSON, each preceded by its length in bytes (u32, little endian). The first has the
settings, with "path", Python's module search path. The first reply reports that the worker is
ready.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_LENGTH = struct.Struct("<I")


class Messages:
    """JSON messages, read from ``reader`` and written to ``writer``."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self.reader = reader
        self.writer = writer

    def read(self) -> Any:
        """The next message, None at the end of the stream."""
        header = self.reader.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        body = self.reader.read(length)
        return json.loads(body) if len(body) == length else None

    def write(self, message: Any) -> None:
        """Send a message."""
        body = json.dumps(message).encode()
        self.writer.write(_LENGTH.pack(len(body)) + body)
        self.writer.flush()


def _module(stem: str) -> ModuleType:
    """Load a module of this folder, which is on no path."""
    spec = importlib.util.spec_from_file_location(stem, Path(__file__).with_name(f"{stem}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the worker named on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    messages = Messages(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stray output must not mix with replies
    settings = messages.read()
    if settings is not None:
        sys.path[:] = settings["path"]
        _module(sys.argv[1]).serve(settings, messages, _module("sandbox_limits"))


if __name__ == "__main__":
    main()
