"""The engine's end of the connections to front ends: calls come in, rounds go out.

A thread reads the calls; where one is expected and nothing is open, the service's own thread does,
which need not be woken then. That thread writes the rounds, one for each front end and step; what a
front end does not read in time waits here.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from urdir.model.owner import Owner
from urdir.model.serve.apart import wire
from urdir.model.serve.kept import Store

if TYPE_CHECKING:
    from urdir.model.engine.adapters import AdapterScale
    from urdir.model.engine.requests.answer import Answer
    from urdir.model.engine.requests.metrics import Metrics
    from urdir.model.engine.requests.request import Item, Request
    from urdir.model.engine.requests.slots import SlotAction, SlotDone
    from urdir.model.text.matcher import ConstraintCompiler

log = logging.getLogger("urdir.serve")
_CHUNK = 1 << 18  # bytes read at once
_COMPILING = 32  # calls that wait for a constraint
#: Seconds for which calls are left to the thread of the service, whose step is launched then; and
#: for which that waits for the other thread to leave them.
_LEFT_SECONDS, _TURN_SECONDS = 0.003, 0.0005


class Engine(Protocol):
    """What desks need of a `Service`."""

    @property
    def compiler(self) -> ConstraintCompiler:
        """Of constraints."""

    @property
    def lost(self) -> Exception | None:
        """Why nothing is answered any more."""

    def answer_to(self, request: Request, deliver: Callable[[Item], None]) -> Answer:
        """See `Service`."""

    def expect(self, look: Callable[[], bool]) -> bool:
        """See `Service`."""

    def add(self, answer: Answer) -> None:
        """See `Service`."""

    def stop(self, answer: Answer) -> None:
        """See `Service`."""

    def cancel(self, answer: Answer) -> None:
        """See `Service`."""

    def act_on_slot(self, action: SlotAction) -> SlotDone:
        """See `Service`."""

    def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """See `Service`."""

    def metrics(self) -> Metrics:
        """See `Service`."""


class Desk:
    """The connection to one front end. ``compilers`` run what takes long; ``wake`` has the thread
    of calls look for what is unsent; ``expect`` is called when a request begins to arrive;
    ``store`` is of all front ends."""

    def __init__(
        self,
        connection: socket.socket,
        compilers: ThreadPoolExecutor,
        wake: Callable[[], None],
        expect: Callable[[Engine], None],
        store: Store,
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_ready = threading.Event()  # once it has the texts, or their failure
        self.failure: wire.Failure | None = None
        self._compilers = compilers
        self._wake = wake
        self._expect = expect
        self._store = store
        self._frames = wire.Frames()
        self._answers: dict[int, Answer | None] = {}  # None: its constraint is being compiled
        self._updates: list[wire.Update] = []
        self._lock = threading.Lock()  # of what follows
        self._unsent = bytearray()
        self.is_open = True

    # ---- the thread that reads calls ----

    def receive(self, engine: Engine) -> bool:
        """Take the calls that arrived; False at the end of the connection."""
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        try:
            for body in self._frames.push(data):
                self._take(engine, wire.decode_call(body))
        except Exception as error:  # ends the front end, not the thread
            log.error("a call of a front end failed: %s", error, exc_info=error)
            return False
        return bool(data)

    def _take(self, engine: Engine, call: wire.Call) -> None:
        match call:
            case wire.Ask():
                self._answers[call.number] = None
                if call.constraint is None:
                    self._ask(engine, call)
                else:
                    self._compilers.submit(self._ask, engine, call)
            case wire.Stop():
                if (answer := self._answers.get(call.number)) is not None:
                    engine.stop(answer)
            case wire.Cancel():
                with self._lock:
                    answer = self._answers.pop(call.number, None)
                if answer is not None:
                    engine.cancel(answer)
            case wire.Check() | wire.Slot():
                self._compilers.submit(self._reply, call.number, partial(_do, engine, call))
            case wire.Query() | wire.Keep() | wire.Scales():
                self._reply(call.number, partial(self._found, engine, call))
            case wire.Ready() | wire.Expect():
                self._note(engine, call)

    def _note(self, engine: Engine, call: wire.Ready | wire.Expect) -> None:
        if isinstance(call, wire.Expect):
            self._expect(engine)
        else:
            self.failure = call.failure
            self.is_ready.set()

    def _ask(self, engine: Engine, call: wire.Ask) -> None:
        try:
            answer = engine.answer_to(call.request, partial(self._collect, call.number))
        except Exception as error:
            self._answers.pop(call.number, None)
            self.send(wire.Round([wire.Update.of(call.number, error)]))
            return
        with self._lock:
            if call.number not in self._answers:  # cancelled meanwhile
                return
            self._answers[call.number] = answer
            engine.add(answer)  # before it can be cancelled; this never waits

    def _found(self, engine: Engine, call: wire.Query | wire.Keep | wire.Scales) -> wire.Update:
        if isinstance(call, wire.Scales):
            return wire.Update(call.number, adapters=engine.adapters(call.scales))
        if isinstance(call, wire.Keep):
            kept = self._store.do(call.action, call.name, call.value, call.start)
            return wire.Update(call.number, kept=kept)
        if engine.lost is not None:
            raise engine.lost
        return wire.Update(call.number, metrics=engine.metrics())

    def _reply(self, number: int, job: Callable[[], wire.Update]) -> None:
        try:
            update = job()
        except Exception as error:
            update = wire.Update.of(number, error)
        self.send(wire.Round([update]))

    def leave(self, engine: Engine) -> None:
        """The front end is gone: cancel its answers."""
        self.close()
        with self._lock:
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            if answer is not None:
                engine.cancel(answer)

    # ---- the thread of the service ----

    def _collect(self, number: int, item: Item) -> None:
        update = wire.Update.of(number, item)
        if update.ending is not None or update.failure is not None:
            self._answers.pop(number, None)
        self._updates.append(update)

    def flush(self) -> None:
        """Send what was collected."""
        if self._updates:
            updates, self._updates = self._updates, []
            self.send(wire.Round(updates))

    # ---- any thread ----

    def send(self, message: wire.Round) -> None:
        """Send a round, or keep what the connection does not take now."""
        data = wire.frame(message)
        with self._lock:
            if not self.is_open:
                return
            if self._unsent:
                self._unsent += data
                return
            with suppress(BlockingIOError, ConnectionError):  # the reader finds the end
                data = data[self.connection.send(data) :]
            self._unsent += data
            is_late = bool(data)
        if is_late:
            self._wake()

    @property
    def has_unsent(self) -> bool:
        """Whether the connection did not take all."""
        return bool(self._unsent)

    def resend(self) -> None:
        """Send some of what was kept."""
        with self._lock, suppress(BlockingIOError, ConnectionError):
            if self.is_open:
                del self._unsent[: self.connection.send(self._unsent)]

    def close(self) -> None:
        """Close the connection; nothing more is sent. Idempotent."""
        with self._lock:
            self.is_open = False
            self.connection.close()


def _do(engine: Engine, call: wire.Check | wire.Slot) -> wire.Update:
    """What may take a while."""
    if isinstance(call, wire.Slot):
        return wire.Update(call.number, done=engine.act_on_slot(call.action))
    engine.compiler.matcher(call.constraint)
    return wire.Update(call.number)


class Desks(Owner):
    """The connections to all front ends, and the thread that reads them once there is an engine."""

    def __init__(self, store: Store) -> None:
        """``store`` has what front ends keep for each other: any of them may get the request that
        goes on from another's response, and one that is replaced loses nothing."""
        self._store = store
        self._desks: tuple[Desk, ...] = ()
        self._lock = threading.Lock()  # of changes of these, and of the pipe
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._compilers = ThreadPoolExecutor(_COMPILING, "constraints")
        self._thread: threading.Thread | None = None
        self._known: dict[Desk, int] = {}  # what is waited for
        self._reading = threading.Lock()  # held by the thread that reads
        self._left_until = 0.0  # calls are left to the thread of the service
        self._is_closing = self._is_closed = False

    def open(self, connection: socket.socket) -> Desk:
        """Add a front end."""
        desk = Desk(connection, self._compilers, self._wake, self._expect, self._store)
        with self._lock:
            self._desks = (*self._desks, desk)
        self._wake()
        return desk

    def post(self, work: Callable[[], None]) -> None:
        """Deliver the items of a round of the service, in its thread; see `Service`."""
        work()
        for desk in self._desks:
            desk.flush()

    def start(self, engine: Engine) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, args=[engine], name="calls", daemon=True)
        self._thread.start()

    def order(self, order: Literal["drain", "abort"]) -> None:
        """Have all front ends end."""
        for desk in self._desks:
            desk.send(wire.Round(order=order))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        with self._reading:
            for desk in self._desks:
                desk.close()
            self._selector.close()
        with self._lock:  # the service may go on
            self._is_closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._wake_write, b".")

    def _run(self, engine: Engine) -> None:
        while not self._is_closing:
            with self._reading:
                self._read(engine)
            if (left := self._left_until - time.monotonic()) > 0:
                time.sleep(left)

    def _expect(self, engine: Engine) -> None:
        """A request begins to arrive."""
        if engine.expect(partial(self._look, engine)):
            self._left_until = time.monotonic() + _LEFT_SECONDS

    def _look(self, engine: Engine) -> bool:
        """Read what has arrived, in the thread of the service; whether anything had, or the other
        thread reads."""
        if not self._reading.acquire(timeout=_TURN_SECONDS):
            return True
        try:
            return self._is_closing or self._read(engine, 0)
        finally:
            self._reading.release()

    def _read(self, engine: Engine, timeout: float | None = None) -> bool:
        """Read what arrives within a time, and send what was unsent; whether there was anything."""
        for desk in self._desks:
            self._watch(desk)
        found = self._selector.select(timeout)
        for key, events in found:
            desk = key.data
            if desk is None:
                os.read(self._wake_read, 4096)
                continue
            if events & selectors.EVENT_WRITE:
                desk.resend()
            if events & selectors.EVENT_READ and not desk.receive(engine):
                self._selector.unregister(desk.connection)
                del self._known[desk]
                with self._lock:
                    self._desks = tuple(each for each in self._desks if each is not desk)
                desk.leave(engine)
        return bool(found)

    def _watch(self, desk: Desk) -> None:
        """Wait for calls, and for room where something is unsent."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if desk.has_unsent else 0)
        if desk not in self._known:
            self._selector.register(desk.connection, wanted, desk)
        elif self._known[desk] != wanted:
            self._selector.modify(desk.connection, wanted, desk)
        self._known[desk] = wanted
