"""`urdir batch`: answers to the requests of a file, in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import options, prompts, serve_flags, serve_opening, values
from urdir.model.commands.options import UsageError
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.serve.interface import AsyncService, Json

EXAMPLES = """\
  urdir batch in.jsonl out.jsonl -m model.gguf

A line is a request, as OpenAI's batches have it, with a custom_id of its own, since answers come
as they are ready; `url` is a path of `urdir serve`:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hi"}]}}
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "batch", run, "answer a file of requests", EXAMPLES)
    parser.add_argument(
        "requests", metavar="IN.jsonl", type=Path, help="requests, one a line; -: from stdin"
    )
    parser.add_argument(
        "answers",
        metavar="OUT.jsonl",
        type=Path,
        help="answers, each as soon as it is there; -: to stdout",
    )
    serve_flags.add_opening_flags(parser)
    parser.add_argument(
        "--at-once",
        type=values.whole_number(1, 1024),
        default=256,
        metavar="N",
        help="requests in flight (256)",
    )
    serve_flags.add_request_flags(parser)
    parser.set_defaults(file=None, share_prefixes=True)
    parser.read_variables()


def run(args: argparse.Namespace) -> int:
    """Answer all requests. The exit code is 1 if one failed. Raises DeviceLostError."""
    from urdir.model.serve.loops import run_in_loop

    serve_opening.check_extra()
    if args.answers.is_file() and args.answers.stat().st_size:
        raise UsageError(f"{args.answers} is not empty: the answers need a file of their own")
    template = prompts.given_template(args)
    is_piped = str(args.answers) == "-"
    with ExitStack() as files:
        lines: Iterable[bytes]
        if str(args.requests) == "-":
            lines = sys.stdin.buffer
        else:
            lines = files.enter_context(args.requests.open("rb"))
        out = None if is_piped else files.enter_context(args.answers.open("wb", buffering=0))

        def write(answer: Json) -> None:
            line = json.dumps(answer) + "\n"
            if out is None:
                print(line, end="", flush=True)
            else:
                _append(out, line.encode())

        async def answer_all(service: AsyncService) -> tuple[int, int]:
            from urdir.model.serve.access import Access
            from urdir.model.serve.app import make_app
            from urdir.model.serve.limits import Limits
            from urdir.model.serve.metrics import ServerMetrics
            from urdir.model.serve.offline import answer_lines

            app = make_app(service, Access(page=False), Limits(), ServerMetrics())
            try:
                sound = takewhile(lambda _: service.lost is None, lines)
                counts = await answer_lines(app, sound, write, args.at_once)
                if service.lost is not None:
                    raise service.lost
                return counts
            finally:
                await service.close()

        count, failed = run_in_loop(answer_all(serve_opening.open_service(args, template)))
    told = f"{count - failed:,} of {count:,} requests answered"
    print(told, file=sys.stderr if is_piped else sys.stdout)
    return 1 if failed else 0


def _append(out: FileIO, line: bytes) -> None:
    """Write a line; of one that does not fit the disk a part may stay. Raises ModelError."""
    left = memoryview(line)
    try:
        while left:
            left = left[out.write(left) :]
    except OSError as exc:
        raise ModelError(f"{out.name!s}: cannot be written: {exc.strerror}") from exc
