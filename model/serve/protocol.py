"""HTTP protocol of a connection: uvicorn's, with handling of stalled and half-closed clients."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from urdir.model.serve.connections import Connections
from urdir.model.serve.limits import Limits

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_PROBE_SECONDS = 0.5  # after a client has shut down its sending half
_REFUSAL_SECONDS = 0.1  # after a probe, for a reset to arrive


class _PlainCycle(RequestResponseCycle):
    """uvicorn's class for a request by HTTP/1.0, which knows no chunks: a body of unknown length
    ends with the connection, which uvicorn closes."""

    _is_endless = False  # whether the length of the body is unknown

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._is_endless = b"content-length" not in names
            if self._is_endless:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._is_endless:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol class, extended to disconnect clients that stop reading or sending, and
    those whose headers do not end: the parser has no bound for them.

    Their requests are cancelled and unsent data is dropped. Before that, a client that does not
    read gets no more data from the engine than the write buffer holds.

    A client that shuts down its sending half may still read, or be gone: both look the same until
    something is sent. It gets its answer. Until the answer begins, "100 Continue" is sent now and
    then: it has no meaning after a complete request (RFC 9110, 15.2.1), and the system of a client
    that is gone resets the connection.
    """

    _limits: Limits
    _clients: Connections
    _stalled: asyncio.TimerHandle | None = None
    _silent: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None  # set once the client's sending half is closed
    _head = 0  # bytes of the headers of a request, or of those behind a chunked body
    _is_head = False  # whether what is parsed is nothing else

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(was_waiting=True)
        self._clients.opened(self)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST ") and self._is_waiting():
            self._clients.on_post()
        self._is_head = True
        super().data_received(data)
        self._head = self._head + len(data) if self._is_head else 0
        if self._head > self._limits.head:
            self._refuse_head()
        if not self._is_waiting():
            self._clients.works(self)

    def on_message_begin(self) -> None:
        self._is_head = False  # what follows it is at most one part of what the system has received
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope["http_version"] == "1.0":
            self.cycle.__class__ = _PlainCycle  # its task has not begun

    def on_body(self, body: bytes) -> None:
        self._is_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_head = False
        super().on_message_complete()

    def _refuse_head(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_waiting():
            self.send_400_response(f"Headers are larger than {self._limits.head} bytes.")
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # may begin a pipelined request
        if not self._is_waiting() or self.transport.is_closing():
            return
        if self._probe is not None:
            self.transport.close()
        else:
            self._clients.waits(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open while an answer is pending."""
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
        """Whether an answer has not begun, for a client with HTTP/1.1."""
        if self._is_waiting() or self.cycle.response_started:
            return False
        return bool(self.cycle.scope["http_version"] != "1.0")

    def _is_waiting(self) -> bool:
        """Whether no request is open."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self, was_waiting: bool) -> None:
        """Schedule a check for a new request."""
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
    """The protocol class of a server; uvicorn makes an instance for each connection."""
    return type("Protocol", (_Protocol,), {"_limits": limits, "_clients": connections})


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
