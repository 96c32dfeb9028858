"""`urdir completion`: scripts with which a shell completes commands and flags."""

from __future__ import annotations

import argparse

from urdir.model.commands import options
from urdir.model.commands.parser import Parser

EXAMPLES = """\
  urdir completion bash > ~/.local/share/bash-completion/completions/urdir
  urdir completion zsh > ~/.zfunc/_urdir
  urdir completion fish > ~/.config/fish/completions/urdir.fish

zsh looks in ~/.zfunc where ~/.zshrc has: fpath+=~/.zfunc; autoload -U compinit; compinit
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "completion", run, "print a script that completes commands and flags", EXAMPLES
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish")


def run(args: argparse.Namespace) -> int:
    """Print the script of the whole command line (``args.whole`` makes its parser)."""
    import shtab  # rarely needed

    whole: Parser = args.whole()
    _name_files(whole, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(whole, args.shell))
    return 0


def _name_files(parser: Parser, files: object, folders: object) -> None:
    """Complete file names for flags whose help names a file as the value."""
    for action in [*parser.flags.values(), *parser.positionals]:
        kind = str(action.metavar).partition(" ")[0].partition(".")[0]
        if kind in ("FILE", "MODEL", "OUT", "A", "B"):
            action.complete = files  # type: ignore[attr-defined]
        elif kind == "DIR":
            action.complete = folders  # type: ignore[attr-defined]
    for command in parser.subcommands.values():
        _name_files(command, files, folders)
