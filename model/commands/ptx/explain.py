"""`urdir ptx explain`: what the emulator sees when it runs a kernel, line by line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.model.commands import options, values
from urdir.model.commands.ptx import arguments
from urdir.model.commands.report import extent, fields_text

if TYPE_CHECKING:
    from urdir.driver.explanation import AccessRow, Explanation

EXAMPLES = """\
  urdir ptx explain gemm                               the kernel's first example
  urdir ptx explain normalise --set cols=4095 --top 3     the three worst lines of each kind
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
    from urdir.driver.device import DeviceName
    from urdir.driver.explanation import explain

    if args.kernel is None:
        raise options.UsageError("explain: give a KERNEL (see urdir ptx list)")
    spec = arguments.one_kernel(args)
    target = DeviceName.parse(f"emulator:{args.target}" if args.target else "emulator").target
    found = explain(spec, target)
    if args.json:
        print(json.dumps({"fields": fields_text(spec), **found.as_dict()}, indent=2))
    else:
        _print(found, fields_text(spec), args.top)
    return 0


def _print(found: Explanation, fields: str, top: int | None) -> None:
    print(f"{found.kernel}  {fields}")
    print(
        f"{found.target}, {extent(found.grid)} CTAs of {extent(found.block)} threads: "
        f"{found.warp_instructions:,} instructions of warps, {found.active:.1f} of 32 lanes active"
    )
    _print_accesses("global memory", "sectors", found.global_memory, top)
    _print_accesses("shared memory", "wavefronts", found.shared_memory, top)
    print("\ndivergence: code that ran with a part of its warps' lanes, the most idle lanes first")
    if found.divergence:
        print(f"{'lines':>11} {'instructions':>12} {'warps':>9} {'lanes':>6}  begins with")
    for row in found.divergence[:top]:
        print(
            f"{f'{row.line}-{row.last_line}':>11} {row.instructions:>12} {row.warps:>9,} "
            f"{row.active:>6.1f}  {row.text}"
        )
    _print_rest(len(found.divergence), top)
    print("\nbarriers")
    if found.barriers:
        print(f"{'line':>6} {'warps':>9} {'a CTA':>6}")
    for barrier in found.barriers[:top]:
        print(f"{barrier.line:>6} {barrier.warps:>9,} {barrier.per_cta:>6.1f}  {barrier.text}")
    _print_rest(len(found.barriers), top)


def _print_accesses(title: str, parts: str, rows: Sequence[AccessRow], top: int | None) -> None:
    total, fewest = sum(row.parts for row in rows), sum(row.fewest for row in rows)
    print(f"\n{title}: {total:,} {parts}, {fewest:,} would do")
    if rows:
        print(f"{'line':>6} {'requests':>9} {'lanes':>6} {parts:>10} {'each':>6} {'at best':>7}")
    for row in rows[:top]:
        print(
            f"{row.line:>6} {row.requests:>9,} {row.lanes / row.requests:>6.1f} {row.parts:>10,} "
            f"{row.per_request:>6.2f} {row.fewest / row.requests:>7.2f}  {row.text}"
        )
    _print_rest(len(rows), top)


def _print_rest(count: int, top: int | None) -> None:
    if not count:
        print("  none")
    elif top is not None and count > top:
        print(f"  and {count - top} more lines")
