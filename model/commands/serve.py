"""`urdir serve`: an HTTP server with many protocols and a chat page."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, prompts, replicas, serve_models, values
from urdir.model.commands.opening import begin_warm_up, load, service_options
from urdir.model.commands.options import UsageError
from urdir.model.commands.parser import Parser
from urdir.model.commands.report import print_engine, print_room
from urdir.model.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    import socket

    from ray.serve import Application

    from urdir.model.engine.engine import Engine
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.limits import Limits as EngineLimits
    from urdir.model.engine.requests.service import Service
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.serve.access import Access, Tls
    from urdir.model.serve.apart.settings import Post
    from urdir.model.serve.interface import AsyncService, Defaults
    from urdir.model.serve.limits import Limits
    from urdir.model.serve.logs import LogSettings

EXAMPLES = """\
  urdir serve                                    the built-in demo model, http://127.0.0.1:8080
  urdir serve -m model.gguf -c 8192 --port 9000
  urdir serve -hf org/repo-GGUF --host 0.0.0.0 --api-key-file keys.txt
  urdir serve --models-dir models                all models of a folder, each loaded on demand
  urdir serve -m model.gguf --ray --replicas 4   on four GPUs of a Ray cluster

Ask it with a client of OpenAI, Anthropic or ollama, with a browser, or so:
  curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}'
"""
_CONTEXT_HELP = (
    "tokens of one request, the prompt with its answer, whatever -np is; 0: the model's (default: "
    "the model's, 32768 at most)"
)
#: Seconds of warm-up while weights are loaded; the rest is done while the server is idle.
_WARM_UP_SECONDS = 2.0
#: Packages of the extra without which nothing is served.
_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "serve", run, "answer clients and browsers over HTTP", EXAMPLES
    )
    options.add_file(parser, optional=True)
    add_opening_flags(parser)
    parser.add_argument(
        "--api-workers",
        type=values.whole_number(0, 64),
        default=_usual_workers(),
        metavar="N",
        help="processes for HTTP, templates, tokens and text, apart from the engine's; 0: none, "
        "all in one (default: one for four cores, 8 at most)",
    )
    exits = parser.add_argument(
        "--exit-on-device-loss",
        action="store_true",
        help="end with exit code 1 when the device is lost, so that a supervisor starts it again "
        "(default: answer 503 until Ctrl-C, then the same)",
    )
    add_request_flags(parser)
    models = parser.add_argument_group("several models")
    of_models = {*parser.flags.values()} - {exits}
    options.add_llama_flags(models, "models")
    of_models.add(parser.flags["--sleep-idle-seconds"])
    access = parser.add_argument_group("who may ask")
    options.add_llama_flags(access, "access")
    access.add_argument(
        "--drain",
        type=values.whole_number(0),
        metavar="SECONDS",
        help="once it is to stop (SIGTERM): seconds for open answers, which are aborted then "
        "(default: as long as they take)",
    )
    access.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server; repeatable (default: those of a local address, "
        "any name elsewhere)",
    )
    replicas.add_flags(parser)
    log = parser.add_argument_group("log")
    options.add_llama_flags(log, "log")
    log.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="log what happens and each request, as text or as lines of JSON (default: with -v or "
        "--log-file, as text)",
    )
    log.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans of requests to a collector over HTTP, such as "
        "http://localhost:4318 (extra otel)",
    )
    parser.read_config()
    parser.read_presets({*parser.flags.values()} - of_models)
    parser.read_variables()


def add_opening_flags(parser: Parser) -> None:
    """Flags of a model that is opened for many requests."""
    options.add_llama_flags(parser, "model", "alias", "template", "server")
    options.add_quantize(parser)
    parser.add_argument(
        *("-v", "--verbose", "--log-verbose"),
        action="store_true",
        help="say on stderr what is used",
    )
    options.add_device(parser)
    options.add_gpus(parser)
    options.add_prompt_arithmetic(parser)


def add_request_flags(parser: Parser) -> None:
    """Flags of memory for requests, and of what these leave open."""
    memory = parser.add_argument_group("how many at once")
    options.add_llama_flags(memory, "context", help=_CONTEXT_HELP)
    options.add_many(memory)
    options.add_llama_flags(memory, "memory")
    options.add_placement(memory)
    embeddings = parser.add_argument_group("embeddings and scores, in place of answers")
    options.add_llama_flags(embeddings, "embeddings")
    requests = parser.add_argument_group(
        "what a request leaves open",
        "Without these it is what OpenAI has: temperature 1, and nothing filtered.",
    )
    options.add_llama_flags(requests, "requests")
    options.add_llama_flags(requests, "sampling", default=None)


def check_extra() -> None:
    """Raise UnsupportedError if the packages of the extra are not installed."""
    for module in _EXTRA:  # not imported here, where they may not be needed
        if find_spec(module) is None:
            raise UnsupportedError(f"No module named {module!r}: pip install 'urdir[serve]'")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    replicas.check_flags(args)
    check_extra()
    if serve_models.is_wanted(args):
        _serve_several(args)
        return 0
    if not args.ray:
        _serve_here(args)
        return 0
    replicas.check_ray()
    server = _server(args)
    _, access, _ = server
    with replicas.Cluster(args) as cluster:
        made = replicas.application(args, server)
        cluster.serve(made, lambda: _greet("replicas on Ray", args.host, args.port, access))
    return 0


def application(arguments: dict[str, str]) -> Application:
    """What Ray's `serve run` and `serve deploy` make of "flags", those of `urdir serve`."""
    parser = Parser(prog="urdir")
    add_parser(parser.add_subparsers())
    args = parser.parse(["serve", "--ray", *shlex.split(arguments["flags"])])
    replicas.check_flags(args)
    return replicas.application(args, _server(args))


def _serve_here(args: argparse.Namespace) -> None:
    from urdir.model.serve.listening import listen

    if args.api_workers and sys.platform == "win32":
        raise UsageError("--api-workers on Windows: all is in one process there, leave it out")
    server = _server(args)
    _, access, _ = server
    if access.tls is not None:
        access.tls.context()  # an error here, not in each process
    logs = _logs(args)
    logs.begin()
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        _serve_at(args, listener, server, logs, partial(_greet_as, host, port, access))


def _serve_several(args: argparse.Namespace) -> None:
    """Serve several models, each in processes of its own while it is loaded."""
    from urdir.model.serve.limits import Limits

    access = _access(args)
    limits = Limits(stalled_seconds=args.timeout, silent_seconds=args.timeout)
    logs = _logs(args)
    replace(logs, otlp=None).begin()  # spans are those of the models' servers
    alone = replace(access, origins=(), hosts=None, page=False, tls=None)
    serve_one = partial(_serve_one, alone, limits, replace(logs, requests=False))

    def greet(what: str, host: str, port: int) -> None:
        _greet(what, host, port, access)

    serve_models.serve(args, serve_one, access, limits, greet)


def _serve_one(
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
        server = partial(open_service, args, template), access, limits
        _serve_at(args, listener, server, logs, partial(_greet_router, greet))
    except UsageError as error:  # of its table
        raise SettingsError(str(error)) from None


def _greet_router(greet: Callable[[], None], name: str, context: int) -> None:
    greet()


def _serve_at(
    args: argparse.Namespace,
    listener: socket.socket,
    server: replicas.Server,
    logs: LogSettings,
    greet: Callable[[str, int], None],
) -> None:
    """Serve at a socket. ``greet`` gets the model's name and context once it answers; picklable."""
    open_service, access, limits = server
    if args.api_workers and not _makes_embeddings(args):
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
    _engine_options(args, template)  # raise UsageError here, not in each process
    _defaults(args, {})
    names = partial(_names, args)
    front = Front(
        partial(open_texts, args.model, args.quantize, template),
        names=names,
        defaults=partial(_defaults, args),
        access=access,
        limits=limits,
        adapters=_adapters(args),
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

    engine, limits, warm_up = _open_engine(args, template)
    tokenizer = engine.tokenizer if Tokenizer.is_there(engine.file) else None
    return engine, Service(engine, tokenizer, limits, post, warm_up)


def _greet_apart(
    names: Callable[[str], list[str]], greet: Callable[[str, int], None], name: str, context: int
) -> None:
    greet(names(name)[0], context)


def _greet_as(host: str, port: int, access: Access, name: str, context: int) -> None:
    _greet(f"{name}, {context} tokens of context", host, port, access)


def _usual_workers() -> int:
    """How many processes serve HTTP: 50 us of a core a token, and the engine needs one."""
    if not hasattr(os, "sched_getaffinity"):  # Windows and macOS
        return 0
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), 8)


def _greet(what: str, host: str, port: int, access: Access) -> None:
    """Announce the server and its address."""
    scheme = "https" if access.tls is not None else "http"
    where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{what}: {where} (Ctrl-C ends)", file=sys.stderr)
    logging.getLogger("urdir.serve").info("serving %s at %s", what, where)
    if access.hosts is None and not access.api_keys:
        print("anyone who reaches this address may ask (--api-key)", file=sys.stderr)


def _server(args: argparse.Namespace) -> replicas.Server:
    """Server settings from the flags: how to open the service, access, and limits."""
    from urdir.model.serve.limits import Limits

    access, template = _access(args), prompts.given_template(args)
    args.model = options.one_model(args)
    limits = Limits(stalled_seconds=args.timeout, silent_seconds=args.timeout)
    return partial(open_service, args, template), access, limits


def open_service(args: argparse.Namespace, template: str | None) -> AsyncService:
    """Open the engine with its scheduler; ``template`` replaces the file's."""
    if _makes_embeddings(args):
        return _open_embeddings(args)
    from urdir.model.engine.requests.async_service import AsyncService as EngineService
    from urdir.model.serve.served_model import EngineModel

    engine, limits, warm_up = _open_engine(args, template)
    names, context = _names(args, engine.name), engine.session.context
    defaults = _defaults(args, engine.file.metadata)
    model = EngineModel(engine, names, context, defaults, _adapters(args))
    return EngineService(engine, model, limits=limits, warm_up=warm_up)


def _makes_embeddings(args: argparse.Namespace) -> bool:
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
    return _engine_options(args, None).makes_embeddings(config)


def _open_embeddings(args: argparse.Namespace) -> AsyncService:
    """A service of embeddings or scores."""
    from urdir.model.engine.engine import Engine
    from urdir.model.serve.embedding_service import EmbeddingService
    from urdir.model.serve.served_model import EngineModel

    wanted = replace(_engine_options(args, None), embeddings=True, text=True)
    with load(wanted) as loading:
        engine = Engine(loading)
    if args.verbose:
        print(f"{engine!r}", file=sys.stderr)
    names, context = _names(args, engine.name), engine.encoder.context
    model = EngineModel(engine, names, context, _defaults(args, engine.file.metadata))
    return EmbeddingService(engine, model, "rank" if args.reranking else args.pooling)


def _open_engine(
    args: argparse.Namespace, template: str | None
) -> tuple[Engine, EngineLimits, WarmUp | None]:
    """The engine, the limits of its scheduler, and what is left of its warm-up."""
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.limits import Limits
    from urdir.model.serve.apart.settings import SWITCH_SECONDS

    sys.setswitchinterval(SWITCH_SECONDS)
    with load(_engine_options(args, template)) as loading:
        warm_up = begin_warm_up(loading, _WARM_UP_SECONDS)
        engine = Engine(loading)
    if args.adapters_unapplied and engine.session.adapters is not None:
        engine.session.adapters.default = ()
    if args.verbose:
        print_engine(engine)
    print_room(engine)
    limits = Limits.for_latency(engine.session.shapes, share_prefixes=args.share_prefixes)
    return engine, limits, warm_up


def _engine_options(args: argparse.Namespace, template: str | None) -> EngineOptions:
    return replace(
        service_options(args, args.model, args.ctx_size),
        drafts=options.drafts(args),
        draft=options.draft(args),
        chat=None,
        chat_template=template,
    )


def _adapters(args: argparse.Namespace) -> tuple[tuple[str, float], ...]:
    """Names of adapters for clients, as the engine gives them, and their scales."""
    from urdir.model.engine.adapters import adapter_names

    names = adapter_names([path for path, _ in args.adapters])
    return tuple(zip(names, (scale for _, scale in args.adapters), strict=True))


def _names(args: argparse.Namespace, name: str) -> list[str]:
    """Model names for clients: the aliases, or the ``name`` in the file and the one given here,
    without a path, which clients must not see."""
    from urdir.model.files.demo import DEMO
    from urdir.model.files.hub import PREFIX

    if args.alias:
        names: list[str] = args.alias
        return names
    given = args.model or DEMO
    return [name, given if given.startswith(PREFIX) else Path(given).absolute().name]


def _defaults(args: argparse.Namespace, metadata: Mapping[str, Any]) -> Defaults:
    """Defaults of requests, from the flags and the ``metadata`` of the model's file."""
    from urdir.model.serve.interface import Defaults

    return Defaults(
        settings=options.sampling_settings(args, Defaults().settings, metadata),
        limit=args.n_predict,
        variables=prompts.given_variables(args),
        thinking=prompts.given_thinking(args),
        thinking_message=args.reasoning_budget_message,
    )


def _access(args: argparse.Namespace) -> Access:
    from urdir.model.serve.access import Access

    keys = [key.strip() for given in args.api_key for key in given.split(",")]
    if not all(keys):
        raise UsageError("--api-key is empty: leave it out for no key")
    if args.api_key_file is not None:
        lines = prompts.read_text("--api-key-file", args.api_key_file).splitlines()
        read = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not read:
            raise UsageError(f"--api-key-file {args.api_key_file}: it has no keys")
        keys += read
    origins = [origin.strip() for given in args.cors for origin in given.split(",")]
    return Access(tuple(keys), tuple(origins), _hosts(args), args.page, _tls(args))


def _tls(args: argparse.Namespace) -> Tls | None:
    from urdir.model.serve.access import Tls

    certificate, key = args.ssl_cert_file, args.ssl_key_file
    if (certificate is None) != (key is None):
        raise UsageError("--ssl-cert-file and --ssl-key-file: give both, or put a proxy before it")
    return None if certificate is None else Tls(certificate, key)


def _logs(args: argparse.Namespace) -> LogSettings:
    from urdir.model.serve.logs import LogSettings

    endpoint = args.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise UsageError(
            f"--otlp-endpoint {endpoint}: expected a URL such as http://localhost:4318"
        )
    return LogSettings(args.log_format, args.log_file, args.verbose, otlp=endpoint)


def _hosts(args: argparse.Namespace) -> frozenset[str] | None:
    """Host names that browsers may use for this server; None: any."""
    is_local = args.host in ("localhost", "::1") or args.host.startswith("127.")
    if not is_local and not args.allowed_host:
        return None
    own = f"[{args.host}]" if ":" in args.host else args.host
    return frozenset(name.lower() for name in (*_LOOPBACK, own, *args.allowed_host))
