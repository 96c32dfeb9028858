"""A front end's connection to the engine's process: the service that its server answers with."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.answering import Answering
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Item, Request
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.serve.apart import wire
from urdir.model.serve.errors import loading
from urdir.model.serve.interface import ServedModel
from urdir.model.serve.kept import Action
from urdir.model.text.constraints import Constraint
from urdir.model.text.tokenizer import Tokenizer

_LOOK_SECONDS = 0.01


class EngineLink(Answering[int], asyncio.Protocol):
    """An `AsyncService` by the engine at the other end of a socket.

    ``on_order`` is called when the server is to end: True if its answers are to be aborted;
    ``ordered`` is the order so far. When the engine's process ends, all open answers end with an
    error.
    """

    def __init__(self, tokenizer: Tokenizer | None, connection: socket.socket) -> None:
        super().__init__(tokenizer)
        self._connection = connection
        self._is_late = False  # the transport has something to send
        self.lost: Exception | None = None
        self.on_order: Callable[[bool], None] = lambda aborts: None
        self.ordered: bool | None = None
        self.context: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count()
        self._deliver: dict[int, Callable[[Item], None]] = {}
        self._replies: dict[int, asyncio.Future[wire.Update]] = {}
        self._frames = wire.Frames()
        self._transport: asyncio.Transport
        self._model: ServedModel | None = None

    @classmethod
    async def connect(cls, tokenizer: Tokenizer | None, connection: socket.socket) -> EngineLink:
        """Begin to listen to the engine."""
        link = cls(tokenizer, connection)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        link._send(wire.Ready())
        return link

    # ---- the server's side ----

    @property
    def model(self) -> ServedModel:
        """See `AsyncService`. Raises ApiError until `begin_with`."""
        if self._model is None:
            raise loading()
        return self._model

    def begin_with(self, model: ServedModel) -> None:
        """Answer requests from now on: the engine has loaded the model."""
        self._model = model

    async def check(self, constraint: Constraint) -> None:
        """See `AsyncService`."""
        await self._reply(lambda number: wire.Check(number, constraint))

    async def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """See `AsyncService`."""
        given = None if scales is None else dict(scales)
        return (await self._reply(lambda number: wire.Scales(number, given))).adapters

    async def metrics(self) -> Metrics:
        """See `AsyncService`."""
        metrics = (await self._reply(wire.Query)).metrics
        assert metrics is not None
        return metrics

    async def act_on_slot(self, action: SlotAction) -> SlotDone:
        """See `AsyncService`."""
        done = (await self._reply(lambda number: wire.Slot(number, action))).done
        assert done is not None
        return done

    async def keep(
        self, action: Action, name: bytes, value: bytes = b"", start: int = 0
    ) -> bytes | None:
        """See `Keeping`: the engine's process keeps it for all front ends."""
        return (await self._reply(lambda n: wire.Keep(n, action, name, value, start))).kept

    def expect(self) -> None:
        """A request begins to arrive: tell the engine, so that other threads there leave off."""
        if self._model is not None and not self._open and self.lost is None:
            self._send(wire.Expect())

    async def close(self) -> None:
        """Close the connection; the engine goes on."""
        self._transport.close()

    async def _begin(self, request: Request, deliver: Callable[[Item], None]) -> int:
        number = next(self._numbers)
        self._send(wire.Ask.of(number, request))
        self._deliver[number] = deliver
        return number

    def _stop(self, begun: int) -> None:
        self._send(wire.Stop(begun))

    def _cancel(self, begun: int) -> None:
        if self._deliver.pop(begun, None) is not None and self.lost is None:
            self._send(wire.Cancel(begun))

    async def _reply(self, call: Callable[[int], wire.Call]) -> wire.Update:
        """The answer to a call. Raises its failure, and ApiError until `begin_with`: calls are not
        read before."""
        if self._model is None:
            raise loading()
        number = next(self._numbers)
        self._send(call(number))
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        try:
            update: wire.Update = await reply
        finally:
            del self._replies[number]
        if update.failure is not None:
            raise update.failure.error
        return update

    def _send(self, call: wire.Call) -> None:
        """Send a call at once, if there is room: what a transport is given, uvloop's sends after
        all that the loop has to do."""
        if self.lost is not None:
            raise self.lost
        data = wire.frame(call)
        if not self._is_late:
            with suppress(OSError):  # of no room, or of the end, which the transport finds, too
                data = data[self._connection.send(data) :]
        if data:
            self._transport.write(data)
            if not self._is_late:
                self._is_late = True
                asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Send by the transport until it has sent all."""
        self._is_late = self._transport.get_write_buffer_size() > 0
        if self._is_late:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    # ---- the engine's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for body in self._frames.push(data):
            self._take(wire.decode_round(body))

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.lost = DeviceLostError("the engine has ended")
        if not self.context.done():
            self.context.set_exception(self.lost)
        for number in (*self._deliver, *self._replies):
            self._deliver_update(wire.Update(number, failure=wire.Failure.of(self.lost)))
        self._order(False)

    def _take(self, found: wire.Round) -> None:
        for update in found.updates:
            self._deliver_update(update)
        if found.context and not self.context.done():
            self.context.set_result(found.context)
        if found.order:
            self._order(found.order == "abort")

    def _order(self, aborts: bool) -> None:
        self.ordered = self.ordered or aborts
        self.on_order(aborts)

    def _deliver_update(self, update: wire.Update) -> None:
        """Pass on what is new of a call, unless it was cancelled."""
        if (reply := self._replies.get(update.number)) is not None:
            if not reply.done():
                reply.set_result(update)
            return
        if (deliver := self._deliver.get(update.number)) is None:
            return
        if update.ending is not None or update.failure is not None:
            del self._deliver[update.number]
        for item in update.items():
            deliver(item)
