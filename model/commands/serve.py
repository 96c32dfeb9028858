"""`urdir serve`: an HTTP server with many protocols and a chat page."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from urdir.model.commands import options, replicas
from urdir.model.commands.parser import Parser
from urdir.model.commands.serve_flags import add_flags
from urdir.model.commands.serve_one import greet_at, serve_here
from urdir.model.commands.serve_opening import check_extra, server
from urdir.model.commands.serve_several import is_wanted, serve_several

if TYPE_CHECKING:
    from ray.serve import Application

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


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "serve", run, "answer clients and browsers over HTTP", EXAMPLES
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    replicas.check_flags(args)
    check_extra()
    if is_wanted(args):
        serve_several(args)
    elif args.ray:
        _serve_on_ray(args)
    else:
        serve_here(args)
    return 0


def _serve_on_ray(args: argparse.Namespace) -> None:
    replicas.check_ray()
    given = server(args)
    _, access, _ = given
    with replicas.Cluster(args) as cluster:
        made = replicas.application(args, given)
        cluster.serve(made, lambda: greet_at("replicas on Ray", args.host, args.port, access))


def application(arguments: dict[str, str]) -> Application:
    """What Ray's `serve run` and `serve deploy` make of "flags", those of `urdir serve`."""
    parser = Parser(prog="urdir")
    add_parser(parser.add_subparsers())
    args = parser.parse(["serve", "--ray", *shlex.split(arguments["flags"])])
    replicas.check_flags(args)
    return replicas.application(args, server(args))
