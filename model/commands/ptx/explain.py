"""`urdir ptx explain`: what the emulator sees when it runs a kernel, line by line."""

from __future__ import annotations

import argparse
import json

from urdir.model.commands import options, values
from urdir.model.commands.ptx import arguments
from urdir.model.commands.report import fields_text
from urdir.model.commands.table import fitting, wrapped
from urdir.model.progress import Progress

EXAMPLES = """\
  urdir ptx explain gemm                                   the kernel's first example
  urdir ptx explain normalise --set cols=4095 --top 3      the three worst lines of each kind
  urdir ptx explain gemv_f32 --set format=Q4_K --json      for a regression test: runs are equal

Lines are those of the text that urdir ptx dump prints for the same KERNEL, --set and --target.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "explain", run, "count sectors, bank conflicts, divergence and barriers of a run",
        EXAMPLES,
    )  # fmt: skip
    arguments.add_kernel(parser)
    parser.add_argument("--target", metavar="sm_NN", help="what to pose as (default: sm_90a)")
    parser.add_argument(
        "--top",
        type=values.whole_number(1),
        metavar="N",
        help="only the N worst lines of each kind (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the kernel on random inputs and print the counts, worst first."""
    from urdir.driver.device_name import DeviceName
    from urdir.driver.explainer import explain

    if args.kernel is None:
        raise options.UsageError("explain: give a KERNEL (see urdir ptx list)")
    spec = arguments.one_kernel(args)
    target = DeviceName.parse(f"emulator:{args.target}" if args.target else "emulator").target
    with Progress(f"running {spec.name}"):
        found = explain(spec, target)
    if args.json:
        print(json.dumps({"fields": fields_text(spec), **found.as_dict()}, indent=2))
    else:
        print(wrapped(fields_text(spec), 4))
        for line in found.text(args.top).split("\n"):
            print(fitting(line) if line[:1] == " " else wrapped(line, 4))
    return 0
