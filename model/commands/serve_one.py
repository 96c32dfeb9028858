"""`urdir serve` of one model: in this process, or with HTTP in others."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.commands import prompts, replicas, serve_opening, serve_settings
from urdir.model.commands.options import UsageError

if TYPE_CHECKING:
    import socket

    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.service import Service
    from urdir.model.serve.access import Access
    from urdir.model.serve.apart.settings import Post
    from urdir.model.serve.limits import Limits
    from urdir.model.serve.logs import LogSettings


def serve_here(args: argparse.Namespace) -> None:
    """Serve the model of the flags until Ctrl-C."""
    from urdir.model.serve.listening import listen

    if args.api_workers and sys.platform == "win32":
        raise UsageError("--api-workers on Windows: all is in one process there, leave it out")
    server = serve_opening.server(args)
    _, access, _ = server
    if access.tls is not None:
        access.tls.context()  # an error here, not in each process
    logs = serve_settings.logs(args)
    logs.begin()
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        serve_at(args, listener, server, logs, partial(_greet_as, host, port, access))


def serve_at(
    args: argparse.Namespace,
    listener: socket.socket,
    server: replicas.Server,
    logs: LogSettings,
    greet: Callable[[str, int], None],
) -> None:
    """Serve at a socket. ``greet`` gets the model's name and context once it answers; picklable."""
    open_service, access, limits = server
    if args.api_workers and not serve_opening.makes_embeddings(args):
        _serve_apart(args, listener, access, limits, logs, greet)
        return
    from urdir.model.serve.server import serve

    service = open_service()

    def begun() -> None:
        greet(service.model.names[0], service.model.context)

    serve(service, listener, access, limits, begun, args.exit_on_device_loss, args.drain)


def _serve_apart(
    args: argparse.Namespace,
    listener: socket.socket,
    access: Access,
    limits: Limits,
    logs: LogSettings,
    greet: Callable[[str, int], None],
) -> None:
    """Serve with HTTP in ``--api-workers`` processes."""
    from urdir.model.engine.texts import open_texts
    from urdir.model.serve.apart.settings import Front, Settings
    from urdir.model.serve.apart.supervisor import serve_apart

    template = prompts.given_template(args)
    serve_opening.engine_options(args, template)  # raise UsageError here, not in each process
    serve_opening.defaults(args, {})
    names = partial(serve_opening.names, args)
    front = Front(
        partial(open_texts, args.model, args.quantize, template),
        names=names,
        defaults=partial(serve_opening.defaults, args),
        access=access,
        limits=limits,
        adapters=serve_opening.adapters(args),
        logs=logs,
    )
    settings = Settings(
        partial(_open_for_fronts, args, template),
        front,
        workers=args.api_workers,
        greet=partial(_greet_apart, names, greet),
        exit_on_device_loss=args.exit_on_device_loss,
        drain_seconds=args.drain,
    )
    serve_apart(settings, listener)


def _open_for_fronts(
    args: argparse.Namespace, template: str | None, post: Post
) -> tuple[Engine, Service]:
    from urdir.model.engine.requests.service import Service
    from urdir.model.text.tokenizer import Tokenizer

    engine, limits, warm_up = serve_opening.open_engine(args, template)
    tokenizer = engine.tokenizer if Tokenizer.is_there(engine.file) else None
    return engine, Service(engine, tokenizer, limits, post, warm_up)


def _greet_apart(
    names: Callable[[str], list[str]], greet: Callable[[str, int], None], name: str, context: int
) -> None:
    greet(names(name)[0], context)


def _greet_as(host: str, port: int, access: Access, name: str, context: int) -> None:
    greet_at(f"{name}, {context} tokens of context", host, port, access)


def greet_at(what: str, host: str, port: int, access: Access) -> None:
    """Announce the server and its address."""
    scheme = "https" if access.tls is not None else "http"
    where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{what}: {where} (Ctrl-C ends)", file=sys.stderr)
    logging.getLogger("urdir.serve").info("serving %s at %s", what, where)
    if access.hosts is None and not access.api_keys:
        print("anyone who reaches this address may ask (--api-key)", file=sys.stderr)
