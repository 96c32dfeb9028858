"""A server of HTTP: alone in its process with an engine, or as a front end of one elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.connections import Connections, accept, room
from urdir.model.serve.counts import Counts
from urdir.model.serve.interface import AsyncService
from urdir.model.serve.kept import Keeping
from urdir.model.serve.limits import Limits
from urdir.model.serve.loops import run_in_loop
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.protocol import http_protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger("urdir.serve")

_HANG_UP_SECONDS = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    service: AsyncService,
    listener: socket.socket,
    access: Access,
    limits: Limits,
    on_start: Callable[[], None],
    exit_on_device_loss: bool = False,
    drain_seconds: float | None = None,
) -> None:
    """Answer requests until SIGINT or SIGTERM, then finish open ones, then close ``service``.
    They have ``drain_seconds`` for that.

    A second signal aborts the answers and raises KeyboardInterrupt. Otherwise the error by which
    the device was lost is raised at the end, or at once with ``exit_on_device_loss``. Raises
    ModelError if no file can be opened for connections.
    """

    async def run() -> None:
        try:
            bounds = replace(limits, connections=room(limits.connections, access.tls is not None))
            server = Server(
                service, access, bounds, exit_on_device_loss, drain_seconds=drain_seconds
            )
            on_start()
            await server.serve([listener])
            if server.force_exit:
                await server.hang_up()
            if server.is_interrupted:
                raise KeyboardInterrupt
            await service.drain()
        finally:
            await service.close()

    run_in_loop(run())
    if service.lost is not None:
        raise service.lost


class HttpServer(uvicorn.Server):
    """An application on uvicorn. ``should_exit`` stops it once open requests are answered,
    ``force_exit`` aborts those too; in the main thread, signals set them. So with the tasks in
    ``background``, which write responses without a connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        counts: Counts,
        drain_seconds: float | None = None,
        background: Collection[asyncio.Task[None]] = (),
    ) -> None:
        self.clients = Connections(limits.connections, counts)
        config = uvicorn.Config(
            app,
            http=http_protocol(limits, self.clients),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            proxy_headers=False,
            server_header=False,
            # the protocol cuts connections off that are idle for longer
            timeout_keep_alive=math.ceil(2 * limits.silent_seconds),
        )
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._background = background
        self._tls = access.tls.context() if access.tls is not None else None
        self.is_interrupted = False  # by a second signal
        #: Called when the server stops: ends responses that have no end of their own.
        self.on_stop: Callable[[], None] = lambda: None
        self._deadline: asyncio.TimerHandle | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start on the listening socket."""
        assert sockets is not None
        await super().startup([])
        self._accepting = asyncio.create_task(accept(sockets[0], self._make_protocol, self._tls))

    def _make_protocol(self) -> asyncio.Protocol:
        """Make a protocol, as uvicorn does for its own sockets."""
        config = self.config
        made: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections and finish open requests."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self.on_stop()
        await super().shutdown(sockets)
        while self._background and not self.force_exit:
            await asyncio.wait(self._background, timeout=0.1)
        if self._deadline is not None:
            self._deadline.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's handlers, which would raise the signal again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def hang_up(self) -> None:
        """Close all connections as if the clients had; this cancels open requests."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self._background:
            task.cancel()
        tasks = [*self.server_state.tasks, *self._background]
        if tasks:
            await asyncio.wait(tasks, timeout=_HANG_UP_SECONDS)

    def _end(self, number: int) -> None:
        if self.should_exit:
            self.force_exit = self.is_interrupted = True
            return
        self.should_exit = True
        log.info("to end: finish open requests")
        if number == signal.SIGINT:
            print("\nfinishing open requests; press Ctrl-C again to abort them", file=sys.stderr)
        if self._drain_seconds is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._drain_seconds, self._abort)

    def _abort(self) -> None:
        log.warning("requests are open after %g s: they are aborted", self._drain_seconds)
        self.force_exit = True


class Server(HttpServer):
    """A server that answers with ``service``."""

    def __init__(
        self,
        service: AsyncService,
        access: Access,
        limits: Limits,
        exit_on_device_loss: bool = False,
        counts: Counts | None = None,
        keeping: Keeping | None = None,
        drain_seconds: float | None = None,
    ) -> None:
        counts = counts or Counts()
        background: set[asyncio.Task[None]] = set()
        app = make_app(service, access, limits, ServerMetrics(counts), keeping, background)
        super().__init__(app, access, limits, counts, drain_seconds, background)
        self._service = service
        self._exit_on_device_loss = exit_on_device_loss

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times a second."""
        if self._exit_on_device_loss and self._service.lost is not None:
            return True
        return await super().on_tick(counter)
