"""`urdir ptx diff`: two PTX files or folders, text and resources side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from urdir.model.commands import options
from urdir.model.progress import Progress

EXAMPLES = """\
  urdir ptx diff mine.ptx theirs.ptx
  urdir ptx dump --model model.gguf -o old          and, after a change,
  urdir ptx dump --model model.gguf -o new
  urdir ptx diff old new                            what changed in which kernel
  urdir ptx diff old new --summary                  a line a file
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "diff", run, "compare two PTX files or folders; exit code 1 if any differ",
        EXAMPLES,
    )  # fmt: skip
    parser.add_argument("left", metavar="A", help="PTX file or folder of dumps")
    parser.add_argument("right", metavar="B", help="PTX file or folder of dumps")
    parser.add_argument(
        "--summary", action="store_true", help="a line a file: the costs that differ"
    )


def run(args: argparse.Namespace) -> int:
    """Compare and print; 0 when equal, 1 when not."""
    from urdir.ptxgen.tools.diff import compare, side_by_side, summary

    with Progress("comparing"):
        found = compare(Path(args.left), Path(args.right))
    for difference in found.differences:
        for note in difference.notes:
            print(note, file=sys.stderr)
        if args.summary:
            print(summary(difference))
            continue
        print(f"{difference.left.path} and {difference.right.path} differ:")
        for line in difference.lines:
            print(line)
        for line in side_by_side(difference):
            print(f"  {line}")
    for side, files in ((args.left, found.only_left), (args.right, found.only_right)):
        for file in files:
            print(f"only in {side}: {file.path.name} {file.fields}")
    print(f"{len(found.differences)} differ, {found.equal} equal")
    return 0 if found.is_equal else 1
