"""`urdir serve`: its flags, and those that `urdir batch` has too."""

from __future__ import annotations

import os

from urdir.model.commands import options, replicas, values
from urdir.model.commands.parser import Parser

_CONTEXT_HELP = (
    "tokens of one request, the prompt with its answer, whatever -np is; 0: the model's (default: "
    "the model's, 32768 at most)"
)


def add_flags(parser: Parser) -> None:
    """Declare the flags of a server."""
    options.add_file(parser)
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
        type=values.host_name,
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


def _usual_workers() -> int:
    """How many processes serve HTTP: 50 us of a core a token, and the engine needs one."""
    if not hasattr(os, "sched_getaffinity"):  # Windows and macOS
        return 0
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), 8)
