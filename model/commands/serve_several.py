"""`urdir serve` of several models, each in processes of its own while it is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, serve_opening, serve_settings
from urdir.model.commands.opening import MEMORY_SHARE
from urdir.model.commands.options import UsageError
from urdir.model.commands.serve_models import Models
from urdir.model.commands.serve_one import greet_at, serve_at
from urdir.model.errors import SettingsError

if TYPE_CHECKING:
    import socket

    from urdir.model.serve.access import Access
    from urdir.model.serve.limits import Limits
    from urdir.model.serve.logs import LogSettings


def is_wanted(args: argparse.Namespace) -> bool:
    """Whether models are loaded on demand, or one that sleeps is."""
    return bool(args.models_dir or args.models_preset or args.sleep_idle_seconds >= 0)


def serve_several(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from urdir.model.serve import spans
    from urdir.model.serve.listening import listen
    from urdir.model.serve.router.server import serve_models
    from urdir.model.serve.router.spec import RouterSettings

    access, limits = serve_settings.access(args), serve_settings.limits(args)
    logs = serve_settings.logs(args)
    if logs.otlp is not None:
        spans.check_extra()
    replace(logs, otlp=None).begin()  # spans are those of the models' servers
    alone = replace(access, origins=(), hosts=None, page=False, tls=None)
    models = Models(args, partial(serve_one, alone, limits, replace(logs, requests=False)))
    models.check()
    if access.tls is not None:
        access.tls.context()
    settings = RouterSettings(
        loaded=args.models_max, autoload=args.models_autoload, memory_share=MEMORY_SHARE
    )
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]

        def begun(count: int) -> None:
            greet_at(f"{count} model{'s' * (count != 1)}, loaded on demand", host, port, access)

        serve_models(models.find, settings, listener, access, limits, begun, args.drain)


def serve_one(
    access: Access,
    limits: Limits,
    logs: LogSettings,
    args: argparse.Namespace,
    listener: socket.socket,
    greet: Callable[[], None],
    memory_share: float | None,
) -> None:
    """Serve one model of several in this process, behind the router's."""
    args.gpu_memory_share = args.gpu_memory_share or memory_share
    args.exit_on_device_loss = True  # another process takes its place
    logs.begin()
    try:
        template = prompts.given_template(args)
        args.model = options.one_model(args)
        server = partial(serve_opening.open_service, args, template), access, limits
        serve_at(args, listener, server, logs, partial(_greet_router, greet))
    except UsageError as error:  # of its table
        raise SettingsError(str(error)) from None


def _greet_router(greet: Callable[[], None], name: str, context: int) -> None:
    greet()
