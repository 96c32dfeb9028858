"""`urdir completion`: scripts with which a shell completes commands and flags."""

from __future__ import annotations

import argparse

from urdir.model.commands import options

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
    import shtab  # seldom needed

    print(shtab.complete(args.whole(), args.shell))
    return 0
