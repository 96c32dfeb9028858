"""The `urdir` command: argument parsing, error reporting, exit codes.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted. Results go to stdout, everything else
to stderr.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from urdir.model.commands import terminal
from urdir.model.commands.options import UsageError
from urdir.model.commands.parser import Parser
from urdir.model.commands.report import installed_version

COMMANDS = (
    "run",
    "chat",
    "serve",
    "batch",
    "show",
    "pull",
    "list",
    "quantize",
    "tokenize",
    "detokenize",
    "logits",
    "perplexity",
    "embed",
    "bench",
    "check",
    "ptx",
    "env",
    "completion",
)

EXAMPLES = """\
examples:
  urdir run "What is 27 plus 45?"               one answer of the built-in demo model
  urdir run model.gguf "Hello" --temp 0         greedy answer of your model
  urdir chat model.gguf                         a conversation
  urdir chat -hf org/repo-GGUF                  a model on the Hugging Face hub
  urdir serve model.gguf                        a server of HTTP and a chat page
  urdir batch in.jsonl out.jsonl -m model.gguf  answers to a file of requests
  urdir show model.gguf                         whether it runs here, and what it needs
  urdir bench model.gguf                        decode speed and share of read bandwidth
  urdir ptx list                                every kernel that is generated
"""


def build_parser(command: str = "") -> Parser:
    """The parser of ``command`` only, or of all commands if it is not a command."""
    parser = Parser(
        prog="urdir",
        description="Run GGUF language models on NVIDIA GPUs with generated PTX.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    parser.set_defaults(whole=build_parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"urdir.model.commands.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    terminal.prepare_streams()
    warnings.formatwarning = _warning_line
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout went away (`| head`): quiet
        terminal.give_up_stdout()
        return 0
    except OSError as exc:
        terminal.give_up_stdout()
        where = f"{exc.filename}: " if exc.filename else "input or output: "
        return _failed(f"{where}{exc.strerror or exc}", 1)


def _run(words: list[str]) -> int:
    """Run a command and return its exit code; expected errors are printed."""
    try:
        args = build_parser(words[0] if words else "").parse(words)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        code: int = args.handler(args)
        return code
    except _usage_errors() as exc:
        page = " ".join([args.command, *filter(None, [getattr(args, "subcommand", None)])])
        return _failed(f"{exc} (see urdir {page} --help)", 2)
    except _reported_errors() as exc:
        return _failed(f"{exc}{_hint(exc, args)}", 1)


def _hint(error: Exception, args: argparse.Namespace) -> str:
    """The flag that helps: libraries speak of arguments."""
    from urdir.model.errors import ContextFullError, NoRoomError, NoTemplateError

    if isinstance(error, NoTemplateError):
        return " (--chat-template NAME, urdir run --raw)"
    if isinstance(error, NoRoomError):
        streams = getattr(args, "fit", "on") != "off" or args.device_memory is not None
        return "" if streams else " (--fit)"
    return " (-c N)" if isinstance(error, ContextFullError) else ""


def _failed(message: str, code: int) -> int:
    print(f"urdir: error: {terminal.printable(message, keep=chr(10) + chr(9))}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"urdir {installed_version('urdir')}")
        parser.exit()


def _warning_line(message: Warning | str, *where: object, **more: object) -> str:
    """A warning as a user reads it: without the place in the source."""
    return f"urdir: warning: {terminal.printable(message)}\n"


def _reported_errors() -> tuple[type[Exception], ...]:
    """The packages' error bases: errors reported without a traceback."""
    from urdir.driver.errors import DriverError
    from urdir.model.errors import ModelError
    from urdir.ptxgen.errors import PtxgenError

    return (DriverError, ModelError, PtxgenError)


def _usage_errors() -> tuple[type[Exception], ...]:
    """What the command line itself is to blame for."""
    from urdir.driver.errors import DeviceNameError
    from urdir.model.errors import HubNameError, SettingsError
    from urdir.ptxgen.errors import SettingError

    return (UsageError, DeviceNameError, HubNameError, SettingError, SettingsError)
