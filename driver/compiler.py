"""The program whose processes compile kernels for another one (`apart.Compilers`).

python -m urdir.driver.compiler DEVICE FOLDER LIMIT [MODULE ...]

It imports modules that kernels will need, receives sockets on stdin, a socket, and forks a process
for each. A byte goes back on these once the device is open, and one for each kernel that comes. No
device is open before a fork. All end when what asks them does.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from urdir.driver.apart import DONE, read
from urdir.driver.device import Device

#: Compiling is less urgent than what a service does meanwhile.
_NICE = 5
#: Processes that open the device at the same time: of fourteen that do, none has it before all.
_AT_ONCE = 4
#: Sockets that are received, at most.
_MOST = 64
_FAILED = b"0"


def main(device: str, folder: str, limit: str, *modules: str) -> None:
    """Fork the processes, and wait for the end."""
    os.nice(_NICE)
    _import(modules)
    with socket.socket(fileno=0) as control:
        _, found, *_ = socket.recv_fds(control, 1, _MOST)
        sockets = [socket.socket(fileno=number) for number in found]
        turns, done = os.pipe()
        os.write(done, b"." * _AT_ONCE)
        for own in sockets:
            if not os.fork():
                for other in (control, *sockets):
                    if other is not own:
                        other.close()
                os.read(turns, 1)
                try:
                    opened = Device.open(
                        device,
                        cache_folder=Path(folder) if folder else None,
                        cache_limit=int(limit) or None,
                    )
                finally:
                    os.write(done, b".")
                serve(own, opened)
                return
        for each in sockets:
            each.close()
        control.recv(1)


def _import(modules: Sequence[str]) -> None:
    """Import modules, and all of packages, as far as they are found."""
    for name in modules:
        with suppress(ImportError):  # the kernel that needs it fails
            path = getattr(importlib.import_module(name), "__path__", ())
            for found in pkgutil.walk_packages(path, f"{name}."):
                importlib.import_module(found.name)


def serve(own: socket.socket, device: Device) -> None:
    """Compile what comes until that ends."""
    with device, own.makefile("rwb") as pipe:
        pipe.write(DONE)
        pipe.flush()
        while True:
            try:
                kernel = read(pipe)
                if kernel is None:
                    return
                device.store(kernel)
                reply = DONE
            except Exception:  # the process that loads it says what is wrong
                reply = _FAILED
            pipe.write(reply)
            pipe.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
