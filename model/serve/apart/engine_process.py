"""The engine's process: the scheduler, the device, and the front ends that it starts."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection as waiting
from typing import TYPE_CHECKING, Any, Literal

from urdir.model.errors import ModelError
from urdir.model.serve.apart import wire
from urdir.model.serve.apart.desks import Desk, Desks
from urdir.model.serve.apart.settings import CANNOT_SERVE, Settings
from urdir.model.serve.counts import Counts
from urdir.model.serve.kept import Store

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from urdir.model.engine.requests.service import Service

log = logging.getLogger("urdir.serve")

_TICK_SECONDS = 0.1  # between looks at the device
_HANG_UP_SECONDS = 10.0  # for front ends to end
_MOST_KILLED_EARLY = 5  # front ends one after another, by a signal while they start
_context = multiprocessing.get_context("spawn")


def run_engine(settings: Settings, listener: socket.socket, control: Connection) -> None:
    """Serve until ``control`` says to end. It gets the model's name and context when requests are
    served, and at the end a `wire.Failure` or None."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process takes them
        signal.signal(number, signal.SIG_IGN)
    failure = None
    try:
        settings.front.logs.begin()
        _Engine(settings, listener, control).run()
    except (Exception, KeyboardInterrupt) as error:
        failure = wire.Failure.of_end(error)
    with suppress(OSError):  # the first process is gone
        control.send(failure)


def _run_front(*given: Any) -> None:
    """What a front end needs is imported in its process alone."""
    from urdir.model.serve.apart.front_process import run_front

    run_front(*given)


@contextmanager
def _killed_with_the_first_process() -> Iterator[None]:
    """Kill this process if the first one ends meanwhile, as that one would at Ctrl-C: opening an
    engine may take minutes, and cannot be interrupted."""
    first, has_left = multiprocessing.parent_process(), threading.Event()

    def watch() -> None:
        while first is not None and not has_left.wait(_TICK_SECONDS):
            if not first.is_alive():
                os.kill(os.getpid(), signal.SIGKILL)  # front ends end with it

    threading.Thread(target=watch, name="first process", daemon=True).start()
    try:
        yield
    finally:
        has_left.set()


@dataclass(slots=True)
class _Process:
    """A front end: its process, its connection, its row of counts."""

    process: SpawnProcess
    desk: Desk
    row: int


class _Engine:
    """See `run_engine`."""

    def __init__(self, settings: Settings, listener: socket.socket, control: Connection) -> None:
        self._settings = settings
        self._listener = listener
        self._control = control
        limits = settings.front.limits
        self._desks = Desks(Store(limits.kept_bytes, limits.kept_seconds))
        self._table: Any = _context.RawArray("d", settings.workers * Counts.WIDTH)
        self._order: Literal["", "drain", "abort"] = ""
        self._deadline = math.inf  # of front ends that are to abort
        self._drained = math.inf  # when front ends that drain are to abort
        self._is_interrupted = False
        self._is_alone = False  # the first process is gone: its pipe would be readable for ever
        self._context = 0
        self._killed_early = 0  # front ends one after another, before they were ready

    def run(self) -> None:
        """Open the engine beside the front ends, and serve. Raises what ends it."""
        with ExitStack() as owners:
            owners.callback(self._listener.close)
            fronts = [self._start(row) for row in range(self._settings.workers)]
            owners.callback(self._end, fronts)
            with _killed_with_the_first_process():  # later, `_obey` hears of its end
                engine, service = self._settings.open_engine(self._desks.post)
            owners.callback(engine.close)
            owners.callback(service.close)
            owners.callback(self._desks.close)
            self._desks.start(service)
            self._wait_until_ready(fronts)
            self._context = engine.session.context
            for front in fronts:
                front.desk.send(wire.Round(context=self._context))
            self._control.send((engine.name, self._context))
            self._watch(fronts, service)
            if service.lost is not None:
                raise service.lost
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _start(self, row: int) -> _Process:
        """Start a front end, which inherits that signals are ignored."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _context.Process(
                target=_run_front,
                args=(self._settings.front, theirs, self._listener, self._table, row),
                name=f"front-end-{row}",
                daemon=True,
            )
            process.start()
        return _Process(process, self._desks.open(ours), row)

    def _wait_until_ready(self, fronts: list[_Process]) -> None:
        """Wait until all front ends have read the model's texts. Raises ModelError if one ends."""
        for front in fronts:
            while not front.desk.is_ready.wait(_TICK_SECONDS):
                if front.process.exitcode is not None:
                    raise ModelError("a process that serves HTTP does not start: see above")
            if front.desk.failure is not None:
                raise front.desk.failure.error

    def _watch(self, fronts: list[_Process], service: Service) -> None:
        """Replace front ends that end, until all are to end. Raises ModelError for one that would
        end again."""
        while not self._order or (
            any(front.process.is_alive() for front in fronts) and time.monotonic() < self._deadline
        ):
            self._obey()
            if time.monotonic() >= self._drained:
                self._drained = math.inf
                log.warning(
                    "requests are open after %g s: they are aborted", self._settings.drain_seconds
                )
                self._give("abort")
            sentinels = [front.process.sentinel for front in fronts]
            orders = [] if self._is_alone else [self._control]
            waiting.wait([*sentinels, *orders], _TICK_SECONDS)
            if service.lost is not None and self._settings.exit_on_device_loss:
                self._give("drain")
            for index, front in enumerate(fronts):
                if not self._order and front.process.exitcode is not None:
                    fronts[index] = self._replaced(front)

    def _replaced(self, front: _Process) -> _Process:
        code = front.process.exitcode
        is_ready = front.desk.is_ready.wait(_TICK_SECONDS)  # what it said last may be unread
        if front.desk.failure is not None:
            raise front.desk.failure.error
        self._killed_early = 0 if is_ready else self._killed_early + 1
        was_killed = code is not None and code < 0 and self._killed_early < _MOST_KILLED_EARLY
        if code == CANNOT_SERVE or not (is_ready or was_killed):
            raise ModelError("a process that serves HTTP does not start: see above")
        log.warning("a front end has ended (%s), another begins", code)
        new = self._start(front.row)
        new.desk.send(wire.Round(context=self._context))
        return new

    def _obey(self) -> None:
        """Take orders of the first process, whose end is one."""
        while not self._is_alone and self._control.poll():
            try:
                order = self._control.recv()
            except (EOFError, OSError):
                order, self._is_alone = "abort", True
            self._give(order)
            if order == "abort":
                self._is_interrupted = True
                return

    def _give(self, order: Literal["drain", "abort"]) -> None:
        if self._order not in (order, "abort"):
            self._order = order
            self._listener.close()  # refuses clients, who would wait for front ends that end
            log.info("to end: %s open requests", {"drain": "finish", "abort": "abort"}[order])
            now, drain = time.monotonic(), self._settings.drain_seconds
            if order == "abort":
                self._deadline = now + _HANG_UP_SECONDS
            elif drain is not None:
                self._drained = now + drain
            self._desks.order(order)

    def _end(self, fronts: list[_Process]) -> None:
        """Wait for the front ends, whose connections are closed."""
        self._desks.close()
        deadline = time.monotonic() + _HANG_UP_SECONDS
        for front in fronts:
            front.process.join(max(0.0, deadline - time.monotonic()))
            if front.process.is_alive():
                front.process.kill()
                front.process.join()
