"""HTTP on one connection: uvicorn's, for clients that go away, stay away, or only listen."""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from urdir.model.serve.connections import Connections
from urdir.model.serve.limits import Limits

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_SECONDS = 0.5  # after a client has said that it sends no more
_REFUSAL_SECONDS = 0.1  # after a probe, when a refusal has come


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, but clients that read nothing or send nothing are cut off in time.

    Their requests are cancelled then, and what was written for them is dropped. Until then no more
    is taken from the engine for a client that does not read than the write buffer holds.

    A client that sends no more may still read (it shut down one half of the connection), or be
    gone: both look the same until something is sent. It gets its answer. Until that begins it is
    sent "100 Continue" now and then, which means nothing after a whole request (RFC 9110, 15.2.1),
    and which the system of a client that is gone refuses.
    """

    _limits: Limits
    _clients: Connections
    _stalled: asyncio.TimerHandle | None = None
    _silent: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None  # from when the client sends no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch(was_waiting=True)
        self._clients.opened(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_waiting():
            self._clients.works(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request, where it has come
        if not self._is_waiting() or self.transport.is_closing():
            return
        if self._probe is not None:
            self.transport.close()
        else:
            self._clients.waits(self)

    def eof_received(self) -> bool:
        """Whether the connection stays open."""
        if self._is_waiting() or self.cycle.more_body:
            return False
        if self._probe is None:
            self._probe_after(_FIRST_PROBE_SECONDS)
        return True

    def _probe_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()

        def probe() -> None:
            if self._can_be_probed():
                self.transport.write(_CONTINUE)
            self._probe = loop.call_later(_REFUSAL_SECONDS, look)

        def look() -> None:
            connection = self.transport.get_extra_info("socket")
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            else:
                self._probe_after(2 * seconds)

        self._probe = loop.call_later(seconds, probe)

    def _can_be_probed(self) -> bool:
        """Whether an answer is yet to begin, to a client that knows the other kind."""
        if self._is_waiting() or self.cycle.response_started:
            return False
        return bool(self.cycle.scope["http_version"] != "1.0")

    def _is_waiting(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self, was_waiting: bool) -> None:
        """Look after a time whether a request has come since."""
        self._silent = asyncio.get_running_loop().call_later(
            self._limits.silent_seconds, self._check, self.cycle, was_waiting
        )

    def _check(self, last: object, was_waiting: bool) -> None:
        is_waiting = self._is_waiting()
        if is_waiting and was_waiting and self.cycle is last:
            self.transport.abort()
        else:
            self._watch(is_waiting)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = asyncio.get_running_loop().call_later(
            self._limits.stalled_seconds, self.transport.abort
        )

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stalled, self._silent, self._probe):
            _cancel(timer)
        self._clients.closed(self)
        super().connection_lost(exc)


def http_protocol(limits: Limits, connections: Connections) -> type[asyncio.Protocol]:
    """The protocol of a server's connections; uvicorn makes one for each."""
    return type("Protocol", (_Protocol,), {"_limits": limits, "_clients": connections})


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
