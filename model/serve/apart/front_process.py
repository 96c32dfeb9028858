"""The process of a front end: a server that answers with an engine in another process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.errors import ModelError
from urdir.model.serve.apart import wire
from urdir.model.serve.apart.link import EngineLink
from urdir.model.serve.apart.settings import CANNOT_SERVE, Front
from urdir.model.serve.connections import room
from urdir.model.serve.counts import Counts
from urdir.model.serve.loops import run_in_loop
from urdir.model.serve.served_model import EngineModel, NamedTexts, warm_up
from urdir.model.serve.server import Server
from urdir.model.turns import take_short_turns


def run_front(
    front: Front, connection: socket.socket, listener: socket.socket, table: Any, own: int
) -> None:
    """Serve until the engine's process says to end, or is gone.

    ``table`` is the shared memory of `Counts`, of which row ``own`` is this process's.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine's process says when to end
        signal.signal(number, signal.SIG_IGN)
    front.logs.begin()
    take_short_turns()
    counts = Counts(np.frombuffer(table).reshape(-1, Counts.WIDTH), own)
    with ExitStack() as owners:
        try:
            texts = owners.enter_context(front.open_texts())
            warm_up(texts)
        except ModelError as error:
            with suppress(OSError):  # the engine is gone, for the same cause
                connection.sendall(wire.frame(wire.Ready(wire.Failure.of(error))))
            sys.exit(1)
        try:
            run_in_loop(_serve(front, texts, connection, listener, counts))
        except DeviceLostError:  # the engine's process says why
            sys.exit(1)
        except ModelError as error:
            print(f"urdir: error: {error}", file=sys.stderr)
            sys.exit(CANNOT_SERVE)


class _Server(Server):
    """Takes no signals, which a terminal sends to all processes."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of handlers."""
        yield


async def _serve(
    front: Front,
    texts: NamedTexts,
    connection: socket.socket,
    listener: socket.socket,
    counts: Counts,
) -> None:
    link = await EngineLink.connect(texts.tokenizer, connection)
    connections = room(front.limits.connections, front.access.tls is not None)
    limits = replace(front.limits, connections=connections)
    server = _Server(link, front.access, limits, counts=counts, keeping=link)

    def end(aborts: bool) -> None:
        server.should_exit = True
        server.force_exit = server.force_exit or aborts

    async def begin() -> None:
        """Answer with the model once the engine has it; end if there will be none."""
        try:
            context = await link.context
            defaults = front.defaults(texts.file.metadata)
            names = front.names(texts.name)
            link.begin_with(EngineModel(texts, names, context, defaults, front.adapters))
        except Exception:
            end(False)
            raise

    link.on_order = end
    server.clients.on_post = link.expect
    if link.ordered is not None:
        end(link.ordered)
    beginning = asyncio.create_task(begin())
    await server.serve([listener])  # until then requests are refused
    if server.force_exit:
        await server.hang_up()
    await link.close()
    await beginning
