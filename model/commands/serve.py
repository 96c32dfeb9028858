"""`urdir serve`: an HTTP server with OpenAI's protocol and a chat page."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, replicas
from urdir.model.commands.opening import begin_warm_up, load, service_options
from urdir.model.commands.options import UsageError
from urdir.model.commands.parser import Parser
from urdir.model.commands.report import print_engine, print_room
from urdir.model.errors import UnsupportedError

if TYPE_CHECKING:
    from ray.serve import Application

    from urdir.model.engine.engine import Engine
    from urdir.model.serve.guard import Access
    from urdir.model.serve.interface import AsyncService, Defaults

EXAMPLES = """\
  urdir serve                                    the built-in demo model, http://127.0.0.1:8080
  urdir serve -m model.gguf -c 8192 --port 9000
  urdir serve -hf org/repo-GGUF --host 0.0.0.0 --api-key-file keys.txt
  urdir serve -m model.gguf --ray --replicas 4   on four GPUs of a Ray cluster

Ask it with any OpenAI client, with a browser, or so:
  curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}'
"""
_CONTEXT_HELP = (
    "tokens of one request, the prompt with its answer, whatever -np is; 0: the model's (default: "
    "the model's, 32768 at most)"
)
#: Seconds of warm-up while weights are loaded; the rest is done while the server is idle.
_WARM_UP_SECONDS = 2.0
#: The longest that a thread runs while others wait (default 5 ms): rendering a kernel or recording
#: a graph must not delay the threads that serve requests.
_SWITCH_SECONDS = 0.0005
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "serve", run, "answer OpenAI clients and browsers over HTTP", EXAMPLES
    )
    options.add_file(parser, optional=True)
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
    parser.add_argument(
        "--exit-on-device-loss",
        action="store_true",
        help="end with exit code 1 when the device is lost, so that a supervisor starts it again "
        "(default: answer 503 until Ctrl-C, then the same)",
    )
    memory = parser.add_argument_group("how many at once")
    options.add_llama_flags(memory, "context", help=_CONTEXT_HELP)
    options.add_many(memory)
    options.add_llama_flags(memory, "memory")
    requests = parser.add_argument_group(
        "what a request leaves open",
        "Without these it is what OpenAI has: temperature 1, and nothing filtered.",
    )
    options.add_llama_flags(requests, "requests")
    options.add_llama_flags(requests, "sampling", default=None)
    access = parser.add_argument_group("who may ask")
    options.add_llama_flags(access, "access")
    access.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server; repeatable (default: those of a local address, "
        "any name elsewhere)",
    )
    replicas.add_flags(parser)
    parser.read_variables()


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    replicas.check_flags(args)
    try:
        import urdir.model.serve.server  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error}: pip install 'urdir[serve]'") from None
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
    from urdir.model.serve.server import listen, serve

    open_service, access, limits = _server(args)
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        service = open_service()

        def greet() -> None:
            model = service.model
            _greet(f"{model.names[0]}, {model.context} tokens of context", host, port, access)

        serve(service, listener, access, limits, greet, args.exit_on_device_loss)


def _greet(what: str, host: str, port: int, access: Access) -> None:
    """Announce the server and its address."""
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"{what}: {where} (Ctrl-C ends)", file=sys.stderr)
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
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.async_service import AsyncService as EngineService
    from urdir.model.engine.requests.limits import Limits
    from urdir.model.serve.served_model import EngineModel

    sys.setswitchinterval(_SWITCH_SECONDS)
    usual = service_options(args, args.model, args.ctx_size)
    wanted = replace(
        usual,
        drafts=options.drafts(args),
        draft=options.draft(args),
        chat=None,
        chat_template=template,
    )
    with load(args, wanted) as loading:
        warm_up = begin_warm_up(loading, _WARM_UP_SECONDS)
        engine = Engine(loading)
    if args.verbose:
        print_engine(engine)
    print_room(engine)
    defaults = _defaults(args, engine)
    limits = Limits.for_latency(engine.session.shapes, share_prefixes=args.share_prefixes)
    return EngineService(
        engine,
        lambda service: EngineModel(engine, _names(args, engine), service, defaults),
        limits=limits,
        warm_up=warm_up,
    )


def _names(args: argparse.Namespace, engine: Engine) -> list[str]:
    """Model names for clients: the aliases, or the name in the file and the one given here, without
    a path, which clients must not see."""
    from urdir.model.files.demo import DEMO
    from urdir.model.files.hub import PREFIX

    if args.alias:
        names: list[str] = args.alias
        return names
    given = args.model or DEMO
    return [engine.name, given if given.startswith(PREFIX) else Path(given).absolute().name]


def _defaults(args: argparse.Namespace, engine: Engine) -> Defaults:
    """Defaults of requests, from the flags and the model's file."""
    from urdir.model.serve.interface import Defaults

    return Defaults(
        settings=options.sampling_settings(args, Defaults().settings, engine.file.metadata),
        limit=args.n_predict,
        variables=prompts.given_variables(args),
    )


def _access(args: argparse.Namespace) -> Access:
    from urdir.model.serve.guard import Access

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
    return Access(tuple(keys), tuple(origins), _hosts(args), args.page)


def _hosts(args: argparse.Namespace) -> frozenset[str] | None:
    """Host names that browsers may use for this server; None: any."""
    is_local = args.host in ("localhost", "::1") or args.host.startswith("127.")
    if not is_local and not args.allowed_host:
        return None
    own = f"[{args.host}]" if ":" in args.host else args.host
    return frozenset(name.lower() for name in (*_LOOPBACK, own, *args.allowed_host))
