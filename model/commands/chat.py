"""`urdir chat`: a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from urdir.model.commands import options, prompts
from urdir.model.commands.opening import answer_options, open_engine
from urdir.model.commands.options import UsageError
from urdir.model.commands.parser import Parser
from urdir.model.commands.report import print_engine, print_statistics
from urdir.model.commands.table import aligned
from urdir.model.commands.terminal import printable
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.commands.chat_input import ReadTurn
    from urdir.model.commands.conversation import Conversation

EXAMPLES = """\
  urdir chat                        talk to the built-in demo model
  urdir chat model.gguf -c 0        with as much context as the model takes
  urdir chat model.gguf -sys "Answer in one sentence." --temp 0
  urdir chat model.gguf -jf schema.json            every answer as a schema says; --grammar too
  urdir chat model.gguf --reasoning-budget 200     think for 200 tokens at most; 0: not at all

In the conversation /help lists the commands, Tab completes them and names of files, Ctrl-C stops an
answer, Ctrl-D leaves. Alt-Enter, or a backslash before Enter, begins another line.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(commands, "chat", run, "hold a conversation", EXAMPLES)
    parser.add_argument(
        "words", nargs="*", metavar="MODEL PROMPT", help="the model, and the first turn"
    )
    options.add_model(parser)
    options.add_llama_flags(
        parser, "memory", "prompt", "template", "chat", "generation", "text", "format"
    )
    options.add_sampling(parser)
    options.add_device(parser)
    options.add_gpus(parser)
    options.add_placement(parser)
    options.add_prompt_arithmetic(parser)
    parser.read_variables(prompts.name_a_model)


def run(args: argparse.Namespace) -> int:
    """Read turns until /exit or the end of input."""
    from urdir.model.commands.chat_input import editor, has_terminal, read_line
    from urdir.model.commands.conversation import Conversation
    from urdir.model.environment import read_environment

    prompts.take_words(args)
    first, system = prompts.given_prompt(args), prompts.given_system(args)
    given, form = prompts.given_template(args), prompts.given_format(args)
    at_terminal = has_terminal()
    colours = args.color == "on" or (args.color == "auto" and at_terminal)
    wanted = answer_options(args, chat=True, chat_template=given)
    with open_engine(wanted) as engine:
        context = engine.session.context  # a model without sequences is refused
        if args.verbose:
            print_engine(engine)
        conversation = Conversation(engine, engine.template, args, system, colours)
        conversation.format = form
        if not at_terminal:
            return _talk(conversation, read_line, first)
        print(
            f"{printable(engine.name)} on {engine.device.properties.name}, a context of "
            f"{context} tokens",
            file=sys.stderr,
        )
        if first is None or not args.single_turn:
            print("/help lists the commands, Ctrl-D leaves", file=sys.stderr)
        read = editor(list(COMMANDS), WITH_FILE, read_environment().cache_dir)
        return _talk(conversation, read, first)


def _talk(conversation: Conversation, read: ReadTurn, first: str | None) -> int:
    """Run turn after turn; report what fails, and continue the conversation. Returns the exit code.

    A single turn is one that asks: it ends as ``run`` does."""
    turn, single = first, conversation.args.single_turn
    while True:
        try:
            if turn is None and (turn := read()) is None:
                return 0
            if not _take(conversation, turn.strip("\r\n")):
                return 130 if single and conversation.interrupted else 0
        except (ModelError, UsageError) as exc:
            if single and isinstance(exc, ModelError):
                raise
            print(printable(exc, keep="\n"), file=sys.stderr)
        except EOFError as exc:
            raise ModelError(str(exc)) from exc
        except KeyboardInterrupt:
            if read.__name__ == "read_line":
                return 0
            print("Ctrl-D or /exit leaves", file=sys.stderr)
        turn = None


def _take(conversation: Conversation, turn: str) -> bool:
    """Process a turn of the user: a text or a command. False ends the conversation."""
    name, _, rest = turn.strip().partition(" ")
    if not name.startswith("/"):
        if name:
            conversation.ask(turn)
        return not (name and conversation.args.single_turn)
    if name in LEAVE:
        return False
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        raise UsageError(f"{name}: unknown; " + (f"{near[0]}?" if near else "/help lists commands"))
    COMMANDS[name](conversation, rest.strip())
    return True


def _help(conversation: Conversation, rest: str) -> None:
    """list the commands"""
    for name, command in COMMANDS.items():
        print(f"  {name:<9} {command.__doc__}", file=sys.stderr)
    print("Ctrl-C stops an answer; Alt-Enter begins another line", file=sys.stderr)


def _clear(conversation: Conversation, rest: str) -> None:
    """forget the conversation"""
    conversation.clear()
    print("turns: 0", file=sys.stderr)


def _system(conversation: Conversation, rest: str) -> None:
    """[TEXT]: show the system message, or give another one"""
    if rest:
        conversation.system = rest
    print(f"system: {printable(conversation.system or '(none)', keep=chr(10))}", file=sys.stderr)


def _set(conversation: Conversation, rest: str) -> None:
    """[NAME VALUE]: show the settings of sampling, or change one (temp 0.5)"""
    parser = _Settings(prog="/set", add_help=False)
    options.add_llama_flags(parser, "generation")
    options.add_sampling(parser)
    names = {max(a.option_strings, key=len): a.dest for a in parser.flags.values()}
    values = {n[2:]: d for n, d in names.items() if d not in ("stop", "ignore_eos", "logit_bias")}
    if rest:
        name, _, value = rest.partition(" ")
        flag = f"--{name.lstrip('-')}"
        parser.parse([flag, *value.split()], conversation.args)
        changed = parser.flags[flag].dest
        values = {name: dest for name, dest in values.items() if dest == changed}
    settings = conversation.settings()
    found = {
        name: getattr(settings, dest, getattr(conversation.args, dest))
        for name, dest in values.items()
    }
    rows = [(f"  {name}", str(-1 if value is None else value)) for name, value in found.items()]
    for line in aligned(rows):
        print(line, file=sys.stderr)


def _format(conversation: Conversation, rest: str) -> None:
    """[json | off | FILE]: show or set what answers are: JSON, free, a schema or grammar (.gbnf)"""
    if rest:
        conversation.format = prompts.named_format("/format", rest)
    form = conversation.format
    shown = "free text" if form is None else f"{form.kind} {form.source}"
    print(f"format: {printable(shown)}", file=sys.stderr)


def _retry(conversation: Conversation, rest: str) -> None:
    """answer the last turn again"""
    conversation.retry()


def _undo(conversation: Conversation, rest: str) -> None:
    """forget the last turn and its answer"""
    conversation.undo()
    print(f"turns: {len(conversation.turns) // 2}", file=sys.stderr)


def _save(conversation: Conversation, rest: str) -> None:
    """FILE: write the conversation as JSON"""
    name = _name("/save", rest)
    conversation.save(name)
    print(f"written: {printable(name)}", file=sys.stderr)


def _load(conversation: Conversation, rest: str) -> None:
    """FILE: go on with a conversation that was written"""
    conversation.load(_name("/load", rest))
    print(f"turns: {len(conversation.turns) // 2}", file=sys.stderr)


def _stats(conversation: Conversation, rest: str) -> None:
    """show what the last answer took, and how full the context is"""
    used, last = 0, conversation.statistics
    if last is not None:
        print_statistics(last)
        used = last.prompt_tokens + last.generated_tokens
    context = conversation.engine.session.context
    print(f"{min(used, context)} of {context} tokens of context in use", file=sys.stderr)


def _exit(conversation: Conversation, rest: str) -> None:
    """leave"""


#: Commands that can be typed instead of a turn.
COMMANDS: Mapping[str, Callable[[Conversation, str], None]] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/set": _set,
    "/format": _format,
    "/retry": _retry,
    "/undo": _undo,
    "/save": _save,
    "/load": _load,
    "/stats": _stats,
    "/exit": _exit,
}
#: Those that take the name of a file.
WITH_FILE = ("/save", "/load", "/format")
LEAVE = ("/exit", "/quit", "/bye")
#: Names of some of them in llama.cpp and ollama.
ALIASES = {"/regen": "/retry", "/?": "/help"}


class _Settings(Parser):
    """Flags of the command line as settings of the conversation."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"/set: {message.replace('--', '')}")


def _name(command: str, rest: str) -> str:
    if not rest:
        raise UsageError(f"{command}: give a file")
    return rest
