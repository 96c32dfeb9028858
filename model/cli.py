"""The `urdir` command: argument parsing, error reporting, exit codes.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted. Results go to stdout, everything else
to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from urdir.model.commands.options import UsageError

COMMANDS = ("run", "chat", "serve", "show", "logits", "bench", "check", "ptx", "env")

EXAMPLES = """\
examples:
  urdir run -p "What is 27 plus 45?"            one answer of the built-in demo model
  urdir run -m model.gguf -p "Hello" --temp 0   greedy answer of your model
  urdir chat -m model.gguf                      a conversation
  urdir chat -hf org/repo-GGUF                  a model on the Hugging Face hub
  urdir serve -m model.gguf                     an OpenAI server and a chat page
  urdir show model.gguf                         what is in the file and what it needs
  urdir bench model.gguf                        decode speed and share of read bandwidth
  urdir ptx list                                every kernel that is generated
"""


class _Parser(argparse.ArgumentParser):
    """Reports bad usage in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of ``command`` alone, or of all of them where it is no command."""
    parser = _Parser(
        prog="urdir",
        description="Run GGUF language models on NVIDIA GPUs with generated PTX.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"urdir.model.commands.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(argv[0] if argv else "").parse_args(argv)
    warnings.formatwarning = _warning_line
    try:
        code: int = args.handler(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): quiet, and no flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as exc:
        print(f"urdir {args.command}: {exc}", file=sys.stderr)
        return 2
    except Exception as exc:
        if not isinstance(exc, _reported_errors()):
            raise
        print(f"urdir: error: {exc}", file=sys.stderr)
        return 1


def _warning_line(message: Warning | str, *where: object, **more: object) -> str:
    """A warning as a user reads it: without the place in the source."""
    return f"urdir: warning: {message}\n"


def _reported_errors() -> tuple[type[Exception], ...]:
    """The packages' error bases: what a user is told without a traceback."""
    from urdir.driver.errors import DriverError
    from urdir.model.errors import ModelError
    from urdir.ptxgen.errors import PtxgenError

    return (DriverError, ModelError, PtxgenError)
