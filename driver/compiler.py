"""The program that compiles kernels for another process (`apart.Compilers`).

python -m urdir.driver.compiler DEVICE FOLDER LIMIT [MODULE ...]

Kernels come on stdin, a byte for each goes to stdout. Modules that kernels will need are imported
before the first comes.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from urdir.driver.apart import DONE, read
from urdir.driver.device import Device
from urdir.driver.parallel import Task

#: Compiling is less urgent than what a service does meanwhile.
_NICE = 5
_FAILED = b"0"


def serve(device: str, folder: str, limit: str, *modules: str) -> None:
    """Compile what comes on stdin until that ends."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else is printed there
    path = Path(folder) if folder else None
    opens = partial(Device.open, device, cache_folder=path, cache_limit=int(limit) or None)
    opening = Task(opens, "device")  # while modules are imported
    for name in modules:
        with suppress(ImportError):  # the kernel that needs it fails
            importlib.import_module(name)
    while True:
        try:
            kernel = read(sys.stdin.buffer)
            if kernel is None:
                break
            opening.result().load(kernel).close()
            reply = DONE
        except Exception:  # the process that loads it says what is wrong
            if opening.failed():  # others compile what comes
                return
            reply = _FAILED
        replies.write(reply)
    if not opening.failed():
        opening.result().close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
