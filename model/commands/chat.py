"""`urdir chat`: a conversation."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from urdir.model.commands import options
from urdir.model.commands.opening import open_engine, template_process
from urdir.model.commands.report import end_note, print_statistics
from urdir.model.errors import ContextFullError

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.text.chat import ChatTemplate, Message

EXAMPLES = """\
  urdir chat                      talk to the built-in demo model
  urdir chat -m model.gguf -c 8192 --system "Answer in one sentence."

In the conversation: /clear forgets it, /exit (or end of input) leaves, Ctrl-C stops an answer.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "chat", run, "hold a conversation", EXAMPLES)
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    options.add_generation(parser)
    options.add_sampling(parser)
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Read turns from stdin until /exit or its end."""
    from urdir.model.text.chat import ChatTemplate

    with (
        template_process() as process,
        open_engine(args, args.model, args.ctx_size, text=True) as engine,
        ChatTemplate.from_gguf(engine.gguf, engine.tokenizer, process) as template,
    ):
        _Conversation(engine, template, args).run()
    return 0


class _Conversation:
    """The turns so far; the sequence that answers knows which of their tokens the cache holds."""

    def __init__(self, engine: Engine, template: ChatTemplate, args: argparse.Namespace) -> None:
        self._engine = engine
        self._template = template
        self._args = args
        self._settings = options.sampling_settings(args)
        self._turns: list[Message] = []
        self._clear()

    def run(self) -> None:
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/clear":
                    self._clear()
                case command if command.startswith("/"):
                    print(f"{command}: unknown; /clear and /exit are known", file=sys.stderr)
                case text:
                    self._answer(text)

    def _clear(self) -> None:
        from urdir.model.text.chat import Message

        self._turns = [Message("system", self._args.system)] if self._args.system else []

    def _answer(self, text: str) -> None:
        """One turn. The conversation is rendered whole; the cache keeps what it has in common."""
        from urdir.model.engine.generate import Generation
        from urdir.model.text.chat import Message

        turns = [*self._turns, Message("user", text)]
        generation = Generation(
            self._engine.session,
            self._engine.tokenizer,
            self._template.encode(turns),
            self._settings,
            limit=self._args.n_predict,
            stops=self._args.stop,
            ignore_end=self._args.ignore_eos,
            host_sampling=self._engine.host_sampling,
        )
        pieces: list[str] = []
        try:
            # Ctrl-C stops the answer; what there is of it stays in the conversation.
            with contextlib.suppress(KeyboardInterrupt):
                for piece in generation.text():
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except ContextFullError as exc:
            print(f"this turn does not fit: {exc} (or /clear)", file=sys.stderr)
            return
        print()
        self._turns = [*turns, Message("assistant", "".join(pieces))]
        end_note(generation.statistics, self._engine.session.context)
        print_statistics(generation.statistics)


def _read_line() -> str | None:
    """The next line, after a prompt on a terminal; None at the end of input or on Ctrl-C."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline() or None
    except KeyboardInterrupt:
        return None
