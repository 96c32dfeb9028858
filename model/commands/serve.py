"""`urdir serve`: an HTTP server with OpenAI's protocol and a chat page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, values
from urdir.model.commands.opening import open_engine
from urdir.model.commands.options import UsageError
from urdir.model.errors import UnsupportedError

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.warm_up import WarmUp
    from urdir.model.serve.guard import Access
    from urdir.model.serve.interface import AsyncService

EXAMPLES = """\
  urdir serve                                    the built-in demo model, http://127.0.0.1:8080
  urdir serve -m model.gguf -c 8192 --port 9000
  urdir serve -hf org/repo-GGUF --host 0.0.0.0 --api-key-file keys.txt

Ask it with any OpenAI client, with a browser, or so:
  curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "What is 2 plus 3?"}]}'
"""
#: For preparing, beside the loading of weights; the rest is done while nobody asks.
_WARM_UP_SECONDS = 2.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "serve", run, "answer OpenAI clients and browsers over HTTP", EXAMPLES
    )
    options.add_file(parser, optional=True)
    options.add_model(parser)
    parser.add_argument("-a", "--alias", metavar="NAME", help="name of the model for clients")
    options.add_device(parser)
    options.add_gpus(parser)
    memory = parser.add_argument_group(
        "how many at once",
        "Without -c a prompt with its answer has the model's context, 32768 tokens at most.",
    )
    options.add_many(memory)
    memory.add_argument(
        *("-ctk", "--cache-type-k"),
        choices=("f32", "f16", "bf16", "q8_0"),
        default="f16",
        help="type of keys and values in the cache (f16)",
    )
    group = parser.add_argument_group("who may ask")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument(
        "--port", type=values.whole_number(0, 65535), default=8080, help="0: a free one (8080)"
    )
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="ask for it; repeatable"
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="more keys, one a line: unseen in `ps`"
    )
    group.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin ask; repeatable, * for all (default: none)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server; repeatable (default: those of a local address, "
        "any name elsewhere)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    try:
        from urdir.model.serve.server import listen, serve
    except ImportError as error:
        raise UnsupportedError(f"{error}: pip install 'urdir[serve]'") from None
    from urdir.model.serve.limits import Limits

    access = _access(args)
    args.model = options.one_model(args)
    with listen(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        service = open_service(args)

        def greet() -> None:
            model = service.model
            print(
                f"{model.name}, {model.context} tokens of context: "
                f"http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends)",
                file=sys.stderr,
            )
            if access.hosts is None and not access.api_keys:
                print("anyone who reaches this address may ask (--api-key)", file=sys.stderr)

        serve(service, listener, access, Limits(), greet)
    return 0


def open_service(args: argparse.Namespace) -> AsyncService:
    """The engine with its scheduler, as the flags say."""
    from urdir.model.engine.async_service import AsyncService as EngineService
    from urdir.model.serve.served_model import EngineModel

    warm_up: WarmUp | None = None

    def begin(engine: Engine) -> None:
        """Record the first graphs while the weights are loaded."""
        nonlocal warm_up
        if not engine.device.is_emulated:  # whose steps take longer than their graphs
            warm_up = _warm_up(engine)

    engine = open_engine(
        args,
        args.model,
        args.ctx_size,
        kv_dtype=args.cache_type_k,
        sequences=args.parallel,
        memory_share=args.gpu_memory_share,
        text=True,
        meanwhile=begin,
    )
    pools = engine.session.parts.cache.pools
    if pools:
        tokens = min(pool.pages * pool.page_len for pool in pools)
        print(f"the cache has room for {tokens:,} tokens", file=sys.stderr)
    return EngineService(
        engine, lambda service: EngineModel(engine, args.alias, service), warm_up=warm_up
    )


def _warm_up(engine: Engine) -> WarmUp:
    """Graphs of the likeliest steps, the first of which are recorded here and now."""
    from urdir.model.engine.warm_up import WarmUp, likely_shapes
    from urdir.model.progress import Progress

    warm_up = WarmUp(engine.session.steps, likely_shapes(engine.session.shapes))
    with Progress("preparing", warm_up.left) as progress:
        warm_up.run(_WARM_UP_SECONDS, lambda: progress.advance())
    return warm_up


def _access(args: argparse.Namespace) -> Access:
    from urdir.model.serve.guard import Access

    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            keys += args.api_key_file.read_text().split()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {args.api_key_file}: {error}") from None
        if not keys:
            raise UsageError(f"--api-key-file {args.api_key_file}: it has no keys")
    if not all(keys):
        raise UsageError("--api-key is empty: leave it out for no key")
    return Access(tuple(keys), tuple(args.cors), _hosts(args))


def _hosts(args: argparse.Namespace) -> frozenset[str] | None:
    """The names under which browsers may know this server; None: any."""
    is_local = args.host in ("localhost", "::1") or args.host.startswith("127.")
    if not is_local and not args.allowed_host:
        return None
    own = f"[{args.host}]" if ":" in args.host else args.host
    return frozenset(name.lower() for name in (*_LOOPBACK, own, *args.allowed_host))
