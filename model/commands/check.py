"""`urdir check`: all kernels and the demo model's plans on a device, compared with references."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.opening import device_name, ptx_files
from urdir.model.commands.report import installed_version
from urdir.model.commands.table import markdown
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.verify.check import CheckRow

EXAMPLES = """\
  urdir check                          what to run first on a new GPU, driver or machine
  urdir check --device emulator        the same without a GPU
  urdir check --kernel normalise        one kernel (repeatable), no plans
  urdir check --gpus 2                 also the demo model on two GPUs that share it
  urdir check --json > report.json     every example, as JSON

Times are of single launches of the small examples: mostly what a launch costs to start. GB/s is
that of the example that reaches most. Exit code 1 when anything fails.
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "check", run, "check every kernel and the recorded graphs on a device", EXAMPLES
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="only this kernel, built in or of an installed package; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_device(parser)
    options.add_gpus(parser)


def run(args: argparse.Namespace) -> int:
    """Check and print; 1 when anything failed."""
    from urdir.driver.device_owner import DeviceOwner
    from urdir.model.engine.engine import Engine
    from urdir.model.environment import read_environment
    from urdir.model.verify.check import (
        CONTEXT,
        check_kernel_examples,
        check_plans,
        check_ranks,
        select_kernels,
    )

    if args.gpus is not None and args.kernel:
        raise options.UsageError("--gpus: kernels are checked on one GPU, leave out --kernel")
    environment = read_environment()
    name = device_name(args, environment)
    selected = select_kernels(args.kernel)
    rows: list[CheckRow] = []
    with ptx_files(environment) as files, Progress("checking", len(selected)) as progress:
        with DeviceOwner(name, cache_folder=environment.cache_dir, ptx_files=files) as owner:
            report = _describe(owner.device)
            for kind in progress.over(selected):
                found = tuple(check_kernel_examples(owner, kind))
                _say(progress, kind.name, found)
                rows += found
        if not args.kernel:

            def open_demo(device: str, gpus: int | Sequence[int] | None = None) -> Engine:
                return Engine.open(
                    device=device,
                    gpus=gpus,
                    split=args.split,
                    context=CONTEXT,
                    cache_folder=environment.cache_dir,
                    ptx_files=files,
                )

            for row in check_plans(open_demo, report["device"]):
                _say(progress, row.name, [row])
                rows.append(row)
            if args.gpus is not None:
                rows.append(check_ranks(open_demo, name, args.gpus))
                _say(progress, rows[-1].name, rows[-1:])
    report["edited_ptx"] = list(files.used)
    failed = sum(row.status == "FAILED" for row in rows)
    if args.json:
        details = [dataclasses.asdict(row) | {"status": row.status} for row in rows]
        print(json.dumps(report | {"failed": failed, "rows": details}, indent=2))
    else:
        _print_table(report, rows)
        _print_end(rows)
    return 1 if failed else 0


def _describe(device: Device) -> dict[str, Any]:
    """Print the device and versions on stderr; return them as the head of the report."""
    print(f"checking {device.name}: {device.properties.name}", file=sys.stderr)
    if device.note:
        print(f"{device.note}: using the emulator", file=sys.stderr)
    return {
        "device": device.name,
        "name": device.properties.name,
        "target": device.target,
        "emulated": device.is_emulated,
        "driver": "{}.{}".format(*device.properties.driver_version),
        "urdir": installed_version("urdir"),
    }


def _say(progress: Progress, name: str, rows: Sequence[CheckRow]) -> None:
    """Print a line on stderr, and failures immediately."""
    count = f" ({len(rows)} examples)" if rows[0].example else ""
    progress.note(f"{name}{count}: {_status(rows)}")
    for row in rows:
        if row.failure:
            progress.note(f"  {row.example or row.name}: {row.failure}")


def _status(rows: Sequence[CheckRow]) -> str:
    """One word for several rows: that of the worst row."""
    return next(s for s in ("FAILED", "ok", "skipped") if any(r.status == s for r in rows))


def _print_table(report: dict[str, Any], rows: Sequence[CheckRow]) -> None:
    """One line per kernel: worst error as a fraction of its tolerance, and best bandwidth."""
    kind = "" if report["emulated"] else f", driver for CUDA {report['driver']}"
    print(f"urdir check on {report['device']}: {report['name']} ({report['target']}{kind})\n")
    for name in report["edited_ptx"]:
        print(f"with edited PTX: {name}\n")
    headings = ("what", "examples", "error", "of allowed", "us", "GB/s", "")
    table: list[tuple[str, ...]] = []
    groups: dict[str, list[CheckRow]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    for name, group in groups.items():
        good = [row for row in group if row.status == "ok"]
        worst = max(good, key=_ratio, default=None)
        fastest = max(good, key=lambda row: row.gb_per_s or 0.0, default=None)
        table.append(
            (
                name,
                str(len(group)) if group[0].example else "",
                f"{worst.error:.1e}" if worst else "",
                f"{_ratio(worst):.0%}" if worst else "",
                f"{fastest.microseconds:.1f}" if fastest and fastest.microseconds else "",
                f"{fastest.gb_per_s:.2f}" if fastest and fastest.gb_per_s else "",
                _status(group),
            )
        )
    for line in markdown(headings, table):
        print(line)


def _ratio(row: CheckRow) -> float:
    error = row.error or 0.0
    return error / row.tolerance if row.tolerance else error


def _print_end(rows: Sequence[CheckRow]) -> None:
    """Print all failures in full, and the total."""
    count = {status: sum(row.status == status for row in rows) for status in ("ok", "FAILED")}
    print()
    for row in rows:
        if row.failure:
            print(f"FAILED {row.example or row.name}: {row.failure}")
    skipped = len(rows) - sum(count.values())
    print(f"{count['ok']} ok, {count['FAILED']} failed, {skipped} skipped")
