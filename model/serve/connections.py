"""Client connections: accepting them, and limiting their number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from urdir.model.errors import ModelError
from urdir.model.serve.counts import Counts

try:
    import resource
except ImportError:  # Windows, where sockets are not files
    resource = None  # type: ignore[assignment]

log = logging.getLogger("urdir.serve")

#: Files opened while requests are answered: pipes of template processes, connections about to be
#: refused, files read by libraries.
_SPARE_FILES = 32
_ACCEPTED_AT_ONCE = 8  # fewer than the spare files: excess connections are accepted, then closed
_HANDSHAKE_SECONDS = 10.0
_HANDSHAKES = 64  # at the same time
_PAUSE_SECONDS = 1.0  # after a connection could not be accepted
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class Connection(Protocol):
    """A client connection."""

    transport: asyncio.Transport


class Connections:
    """Limits open connections of all processes to ``most``. A further one replaces the connection
    of its process that has been idle longest, or is refused if all are busy."""

    def __init__(self, most: int, counts: Counts) -> None:
        self._most = most
        self._counts = counts
        self._waiting: dict[Connection, None] = {}  # idle connections, the longest idle first
        #: Called when a request begins to arrive that may want an answer.
        self.on_post: Callable[[], None] = lambda: None

    def opened(self, connection: Connection) -> None:
        """Add a connection that waits for its first request; it may be closed at once."""
        self._counts.add("connections", 1)
        self.waits(connection)
        if self._counts.open("connections") <= self._most:
            return
        longest = next(iter(self._waiting))
        del self._waiting[longest]
        if longest is connection:
            connection.transport.write(_FULL)
            connection.transport.close()
        else:
            longest.transport.abort()

    def waits(self, connection: Connection) -> None:
        """Mark a connection as idle."""
        self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """Mark a connection as busy."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._counts.add("connections", -1)
        self._waiting.pop(connection, None)


async def accept(
    listener: socket.socket,
    make: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Accept connections until cancelled, with TLS if there is a context for it; ``make`` makes the
    protocol of each.

    Replaces asyncio's server, which accepts as many as are pending before the first is counted
    here, and which retries with a traceback each time while no file can be opened.
    """
    loop = asyncio.get_running_loop()
    beginning: set[asyncio.Task[object]] = set()
    listener.setblocking(False)
    try:
        while True:
            try:
                for _ in range(_ACCEPTED_AT_ONCE):
                    connection = await _next(listener)
                    task = loop.create_task(_connect(make, connection, tls))
                    beginning.add(task)
                    task.add_done_callback(beginning.discard)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("accepting no connections for %g s: %s", _PAUSE_SECONDS, error.strerror)
                await asyncio.sleep(_PAUSE_SECONDS)
            if tls is None and beginning:
                await asyncio.wait(beginning)  # which, unlike `gather`, passes no cancelling on
            while len(beginning) > _HANDSHAKES:
                await asyncio.wait(beginning, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await asyncio.sleep(0)  # all have begun: a task that never ran closes no connection
        # Only handshakes take time. uvloop closes a connection without TLS whose beginning is
        # cancelled, and never tells its protocol, for whose end a server that stops would wait.
        for each in beginning if tls is not None else ():
            each.cancel()
        if beginning:
            await asyncio.wait(beginning)


async def _next(listener: socket.socket) -> socket.socket:
    """Accept a connection. Unlike a loop's ``sock_accept``, it loses none when it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            is_readable = asyncio.Event()
            loop.add_reader(listener, is_readable.set)
            try:
                await is_readable.wait()
            finally:
                loop.remove_reader(listener)
        else:
            connection.setblocking(False)
            return connection


async def _connect(
    make: Callable[[], asyncio.Protocol], connection: socket.socket, tls: ssl.SSLContext | None
) -> None:
    """Begin a connection; a client that does not shake hands has it closed."""
    with contextlib.suppress(OSError):  # asyncio's errors of TLS, and of time, are such
        await asyncio.get_running_loop().connect_accepted_socket(
            make,
            connection,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_SECONDS,
        )


def room(wanted: int, with_tls: bool = False) -> int:
    """Number of connections for which files can be opened, at most ``wanted``; ``with_tls`` others
    are shaking hands. Raises the process's limit of open files if needed and permitted. Raises
    ModelError if there is room for none."""
    if resource is None:
        return wanted
    used = _open_files() + _SPARE_FILES + with_tls * _HANDSHAKES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < used + wanted:
        soft = used + wanted if hard == unlimited else min(used + wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = wanted if soft == unlimited else min(wanted, soft - used)
    if found < 1:
        raise ModelError(
            f"the limit of {soft} open files is too low, {used} are in use: raise `ulimit -n`"
        )
    return found


def _open_files() -> int:
    """Open files of this process; if the system does not report them, an upper bound for a GPU."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 256
