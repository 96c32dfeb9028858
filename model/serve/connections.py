"""Connections of clients: how many may be open, and accepting them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Protocol

from urdir.model.errors import ModelError

try:
    import resource
except ImportError:  # Windows, whose sockets are no files
    resource = None  # type: ignore[assignment]

log = logging.getLogger("urdir.serve")

#: Files that are opened while requests are answered: pipes of templates' processes, connections
#: that are about to be refused, what libraries read.
_SPARE_FILES = 32
_ACCEPTED_AT_ONCE = 8  # fewer than spare files: what is beyond the limit is closed after that
_PAUSE_SECONDS = 1.0  # after a connection could not be accepted
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class Connection(Protocol):
    """One of a client."""

    transport: asyncio.Transport


class Connections:
    """At most ``most`` connections: one more takes the place of that which has waited longest for
    a request, and is refused where all are being answered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._waiting: dict[Connection, None] = {}  # in the order in which they began to wait

    def opened(self, connection: Connection) -> None:
        """A connection waits for its first request; it may be closed at once."""
        self._open += 1
        self.waits(connection)
        if self._open <= self._most:
            return
        longest = next(iter(self._waiting))
        del self._waiting[longest]
        if longest is connection:
            connection.transport.write(_FULL)
            connection.transport.close()
        else:
            longest.transport.abort()

    def waits(self, connection: Connection) -> None:
        """It has no request that is open."""
        self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """It has one."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """It is no more."""
        self._open -= 1
        self._waiting.pop(connection, None)


async def accept(listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
    """Accept connections until cancelled, with a protocol that ``make`` makes for each.

    In place of asyncio's own server, which accepts as many as wait before the first is known here,
    and which tries again and again, with a traceback each time, while no file can be opened.
    """
    loop = asyncio.get_running_loop()
    beginning: set[asyncio.Task[object]] = set()
    listener.setblocking(False)
    try:
        while True:
            try:
                for _ in range(_ACCEPTED_AT_ONCE):
                    connection, _ = await loop.sock_accept(listener)
                    task = loop.create_task(loop.connect_accepted_socket(make, connection))
                    beginning.add(task)
                    task.add_done_callback(beginning.discard)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("no connection is accepted for %g s: %s", _PAUSE_SECONDS, error.strerror)
                await asyncio.sleep(_PAUSE_SECONDS)
            await asyncio.gather(*beginning, return_exceptions=True)
    finally:
        await asyncio.gather(*beginning, return_exceptions=True)


def room(wanted: int) -> int:
    """Connections for which files may be opened, ``wanted`` at most. The process's limit of open
    files is raised as far as they need and the system permits. Raises ModelError for none."""
    if resource is None:
        return wanted
    used = _open_files() + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < used + wanted:
        soft = used + wanted if hard == unlimited else min(used + wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = wanted if soft == unlimited else min(wanted, soft - used)
    if found < 1:
        raise ModelError(f"{soft} open files are too few, {used} are used: raise `ulimit -n`")
    return found


def _open_files() -> int:
    """Of this process; where the system does not say, as many as a GPU's driver may open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 256
