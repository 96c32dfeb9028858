"""Running the application: the socket, clients that do not read, and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from urdir.model.errors import ModelError
from urdir.model.serve.app import make_app
from urdir.model.serve.guard import Access
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics

_BACKLOG = 2048  # connections that wait to be accepted
_HANG_UP_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections at ``host`` (a name or an address), port 0: a free one.

    Raises ModelError where that cannot be.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ModelError(
            f"cannot listen on {host}: {error.strerror}: give another --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ModelError(
            f"cannot listen on {host}:{port}: {error.strerror}: give another {flag}"
        ) from None
    return listener


def serve(
    service: AsyncService,
    listener: socket.socket,
    access: Access,
    limits: Limits,
    on_start: Callable[[], None],
) -> None:
    """Answer requests until SIGINT or SIGTERM, then those that are open, then close ``service``.

    A second signal ends the answers; KeyboardInterrupt is raised then.
    """

    async def run() -> None:
        server = Server(service, access, limits)
        try:
            on_start()
            await server.serve([listener])
            if server.force_exit:
                await server.hang_up()
                raise KeyboardInterrupt
            await service.drain()
        finally:
            await service.close()

    asyncio.run(run())


class Server(uvicorn.Server):
    """The application on uvicorn. ``should_exit`` ends it once open requests are answered,
    ``force_exit`` ends those as well; signals set them, where it runs in the main thread.
    """

    def __init__(self, service: AsyncService, access: Access, limits: Limits) -> None:
        config = uvicorn.Config(
            make_app(service, access, limits, ServerMetrics(service)),
            http=_http_protocol(limits),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            proxy_headers=False,
            server_header=False,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's handlers, which would raise the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def hang_up(self) -> None:
        """Close all connections, as if their clients had: that cancels what is open."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        tasks = list(self.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_HANG_UP_SECONDS)

    def _end(self) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        print("\nopen requests are answered; Ctrl-C again ends them", file=sys.stderr)


def _http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, but clients that read nothing or send nothing are cut off in time.

    Their requests are cancelled then, and what was written for them is dropped. Until then no more
    is taken from the engine for a client that does not read than the write buffer holds.
    """

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _stalled: asyncio.TimerHandle | None = None
        _silent: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._watch(was_waiting=True)

        def _watch(self, was_waiting: bool) -> None:
            """Look after a time whether a request has come since."""
            self._silent = asyncio.get_running_loop().call_later(
                limits.silent_seconds, self._check, self.cycle, was_waiting
            )

        def _check(self, last: object, was_waiting: bool) -> None:
            is_waiting = self.cycle is None or self.cycle.response_complete
            if is_waiting and was_waiting and self.cycle is last:
                self.transport.abort()
            else:
                self._watch(is_waiting)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = asyncio.get_running_loop().call_later(
                limits.stalled_seconds, self.transport.abort
            )

        def resume_writing(self) -> None:
            _cancel(self._stalled)
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._stalled)
            _cancel(self._silent)
            super().connection_lost(exc)

    return Protocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
