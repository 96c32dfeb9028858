"""`urdir serve`: the service of one model, from the flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, prompts, replicas, serve_settings
from urdir.model.commands.opening import begin_warm_up, go_on_beside_answers, load, service_options
from urdir.model.commands.report import print_engine, print_room
from urdir.model.errors import UnsupportedError

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.limits import Limits
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.serve.interface import AsyncService, Defaults

#: Seconds of warm-up while weights are loaded; the rest is done while the server is idle.
_WARM_UP_SECONDS = 2.0
#: Packages of the extra without which nothing is served.
_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")


def check_extra() -> None:
    """Raise UnsupportedError if the packages of the extra are not installed."""
    for module in _EXTRA:  # not imported here, where they may not be needed
        if find_spec(module) is None:
            raise UnsupportedError(f"No module named {module!r}: pip install 'urdir[serve]'")


def server(args: argparse.Namespace) -> replicas.Server:
    """Server settings from the flags: how to open the service, access, and limits."""
    access, template = serve_settings.access(args), prompts.given_template(args)
    args.model = options.one_model(args)
    return partial(open_service, args, template), access, serve_settings.limits(args)


def open_service(args: argparse.Namespace, template: str | None) -> AsyncService:
    """Open the engine with its scheduler; ``template`` replaces the file's."""
    if makes_embeddings(args):
        return _open_embeddings(args)
    from urdir.model.engine.requests.async_service import AsyncService as EngineService
    from urdir.model.serve.served_model import EngineModel

    engine, limits, warm_up = open_engine(args, template)
    model = EngineModel(
        engine,
        names(args, engine.name),
        engine.session.context,
        defaults(args, engine.file.metadata),
        adapters(args),
    )
    return EngineService(engine, model, limits=limits, warm_up=warm_up)


def makes_embeddings(args: argparse.Namespace) -> bool:
    """Whether a model is served for embeddings: as the flags say, or its file."""
    from urdir.model.engine.pieces import open_file
    from urdir.model.families.config import Config

    if args.embeddings or args.reranking or args.pooling:
        return True
    with open_file(args.model, args.quantize) as file:
        config = Config.of(file)
    if config.diffuses:
        raise UnsupportedError(
            f"'{config.architecture}' models fill masked tokens, which is not served: use urdir "
            "run, or Engine.diffuse"
        )
    return engine_options(args, None).makes_embeddings(config)


def _open_embeddings(args: argparse.Namespace) -> AsyncService:
    """A service of embeddings or scores."""
    from urdir.model.engine.engine import Engine
    from urdir.model.serve.embedding_service import EmbeddingService
    from urdir.model.serve.served_model import EngineModel

    wanted = replace(engine_options(args, None), embeddings=True, text=True)
    with load(wanted) as loading:
        engine = Engine(loading)
    if args.verbose:
        print(f"{engine!r}", file=sys.stderr)
    model = EngineModel(
        engine,
        names(args, engine.name),
        engine.encoder.context,
        defaults(args, engine.file.metadata),
        embeds=True,
    )
    return EmbeddingService(engine, model, "rank" if args.reranking else args.pooling)


def open_engine(
    args: argparse.Namespace, template: str | None
) -> tuple[Engine, Limits, WarmUp | None]:
    """The engine, the limits of its scheduler, and what is left of its warm-up."""
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.limits import Limits

    with load(engine_options(args, template)) as loading:
        warm_up = begin_warm_up(loading, _WARM_UP_SECONDS)
        engine = Engine(loading)
    go_on_beside_answers(warm_up)
    if args.verbose:
        print_engine(engine)
    print_room(engine)
    limits = Limits.for_latency(engine.session.shapes, share_prefixes=args.share_prefixes)
    return engine, limits, warm_up


def engine_options(args: argparse.Namespace, template: str | None) -> EngineOptions:
    """Return options of the engine. Raises UsageError for flags that do not go together."""
    given = service_options(args, args.model, args.ctx_size)
    if args.adapters_unapplied:  # room for each, not for all together
        given = replace(given, adapters=tuple((path, 0.0) for path, _ in given.adapters))
    return replace(
        given,
        drafts=options.drafts(args),
        draft=options.draft(args),
        chat=None,
        chat_template=template,
    )


def adapters(args: argparse.Namespace) -> tuple[tuple[str, float], ...]:
    """Names of adapters for clients, as the engine gives them, and their scales."""
    from urdir.model.engine.adapters import adapter_names

    names = adapter_names([path for path, _ in args.adapters])
    return tuple(zip(names, (scale for _, scale in args.adapters), strict=True))


def names(args: argparse.Namespace, name: str) -> list[str]:
    """Model names for clients: the aliases, or the ``name`` in the file and the one given here,
    without a path, which clients must not see."""
    from urdir.model.files.demo import DEMO
    from urdir.model.files.hub import PREFIX

    if args.alias:
        names: list[str] = args.alias
        return names
    given = args.model or DEMO
    return [name, given if given.startswith(PREFIX) else Path(given).absolute().name]


def defaults(args: argparse.Namespace, metadata: Mapping[str, Any]) -> Defaults:
    """Defaults of requests, from the flags and the ``metadata`` of the model's file."""
    from urdir.model.serve.interface import Defaults

    return Defaults(
        settings=options.sampling_settings(args, Defaults().settings, metadata),
        limit=args.n_predict,
        variables=prompts.given_variables(args),
        thinking=prompts.given_thinking(args),
        thinking_message=args.reasoning_budget_message,
    )
