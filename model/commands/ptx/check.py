"""`urdir ptx check`: lint and assemble any PTX file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from urdir.model.commands import options
from urdir.model.progress import Progress

EXAMPLES = """\
  urdir ptx check edited.ptx                     for the file's own .target
  urdir ptx check out/*.ptx --target sm_120      all for another one
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "check", run, "lint and assemble PTX files; exit code 1 on any finding", EXAMPLES
    )
    parser.add_argument("files", nargs="+", metavar="FILE.ptx")
    parser.add_argument("--target", metavar="sm_NN", help="assemble for this one")


def run(args: argparse.Namespace) -> int:
    """Print what is wrong, with the lines around it; 1 when anything is."""
    from urdir.ptxgen.target import Target
    from urdir.ptxgen.tools.check import check
    from urdir.ptxgen.tools.diff import read_ptx

    if args.target is not None:
        Target.parse(args.target)
    good = True
    for name in args.files:
        with Progress(name):
            verdict = check(read_ptx(Path(name)).text, args.target, name)
        good = good and verdict.is_good
        if verdict.skipped:
            print(f"{name} was not assembled: {verdict.skipped}", file=sys.stderr)
        if not verdict.is_good:
            print(f"{name}:\n{verdict}")
            continue
        used = ", ".join(
            f"{entry} {r.registers} registers, {r.spill_stores + r.spill_loads} bytes spilt"
            for entry, r in verdict.resources.items()
        )
        print(f"{name}: good" + (f" for {verdict.target}: {used}" if used else ""))
    return 0 if good else 1
