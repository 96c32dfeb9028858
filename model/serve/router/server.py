"""A router as a program: its server, its models, and their end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from urdir.model.serve.access import Access
from urdir.model.serve.connections import room
from urdir.model.serve.counts import Counts
from urdir.model.serve.limits import Limits
from urdir.model.serve.loops import run_in_loop
from urdir.model.serve.router.app import make_router_app
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.forward import own_headers
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.upstream import describe
from urdir.model.serve.server import HttpServer


def serve_models(
    find: Callable[[], Iterable[ModelSpec]],
    settings: RouterSettings,
    listener: socket.socket,
    access: Access,
    limits: Limits,
    on_start: Callable[[int], None],
    drain_seconds: float | None = None,
) -> None:
    """Answer requests with the models that ``find`` finds until SIGINT or SIGTERM, then finish open
    ones and responses in the background, within ``drain_seconds``, and end all models.
    ``on_start`` gets their number.

    A second signal aborts what is open and raises KeyboardInterrupt. Raises ModelError if no file
    can be opened for connections.
    """

    async def run() -> None:
        files = room(2 * limits.connections, access.tls is not None)  # one to a model each
        bounds = replace(limits, connections=max(1, files // 2))
        counts = Counts()
        fleet = Fleet(find, settings, partial(describe, own_headers(access)))
        app = make_router_app(fleet, access, bounds, counts)
        server = HttpServer(app, access, bounds, counts, drain_seconds, fleet.holds.tasks)
        server.on_stop = fleet.changes.end
        await fleet.refresh()
        on_start(len(fleet.models))
        keeping = asyncio.create_task(fleet.run())
        try:
            await server.serve([listener])
            if server.force_exit:
                await server.hang_up()
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            await fleet.close(server.force_exit)
        if server.is_interrupted:
            raise KeyboardInterrupt

    run_in_loop(run())
