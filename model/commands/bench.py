"""`urdir bench`: decode speed beside the device's read bandwidth."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options
from urdir.model.commands.report import installed_version

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.bench import BenchRow
    from urdir.model.profile import ProfileRow

EXAMPLES = """\
  urdir bench model.gguf                     512 prompt tokens, 128 decoded, five runs each
  urdir bench model.gguf -p 0 -n 256 --json  decoding only, as JSON
  urdir bench model.gguf -p 0 -n 64 -d 32768 decoding after 32,768 tokens of context
  urdir bench --shape llama-3.1-8b --type q8_0   no file: random weights of a real shape
  urdir bench model.gguf --profile           and where the time of a decode step goes
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "bench", run, "measure prompt and decode speed", EXAMPLES
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("model", nargs="?", metavar="FILE", help="GGUF file (default: demo model)")
    model.add_argument("--shape", metavar="NAME", help="a model of this shape, random weights")
    parser.add_argument("--type", default="q4_k_m", metavar="TYPE", help="its weights (q4_k_m)")
    count = options.whole_number(0)
    parser.add_argument("-p", "--n-prompt", type=count, default=512, metavar="N", help="(512)")
    parser.add_argument("-n", "--n-gen", type=count, default=128, metavar="N", help="(128)")
    parser.add_argument(
        "-d", "--depth", type=count, default=0, metavar="N", help="tokens of context before (0)"
    )
    parser.add_argument(
        "-r", "--repetitions", type=options.whole_number(1), default=5, metavar="N", help="(5)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also time a decode step launch by launch"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.bench import bench, profile_step, read_bandwidth
    from urdir.model.engine import Engine
    from urdir.model.shapes import SyntheticModel

    context = args.depth + max(args.n_prompt, args.n_gen, 2)
    source = SyntheticModel(args.shape, args.type) if args.shape else args.model
    with Engine.open(source, device=args.device, context=context) as engine:
        if engine.device.is_emulated:
            print("no GPU: these are figures of the emulator", file=sys.stderr)
        bandwidth = read_bandwidth(engine.device)
        rows = []
        for row in bench(
            engine.session,
            engine.gguf,
            bandwidth,
            args.n_prompt,
            args.n_gen,
            args.repetitions,
            args.depth,
        ):
            print(f"{row.test}: {row.tokens_per_second:.1f} tokens/s", file=sys.stderr)
            rows.append(row)
        profile = profile_step(engine.session, bandwidth) if args.profile else ()
        report = _report(engine.device, engine.name, bandwidth)
    if args.json:
        rows_json = [dataclasses.asdict(row) for row in rows]
        profile_json = [dataclasses.asdict(row) for row in profile]
        print(json.dumps(report | {"rows": rows_json, "profile": profile_json}, indent=2))
    else:
        _print_table(report, rows)
        if profile:
            _print_profile(profile)
    return 0


def _report(device: Device, model: str, bandwidth: float) -> dict[str, Any]:
    free, total = device.memory_info()
    return {
        "model": model,
        "device": device.name,
        "emulated": device.is_emulated,
        "driver": device.properties.driver_version,
        "urdir": installed_version("urdir"),
        "read_bandwidth_bytes_per_second": bandwidth,
        "device_bytes_used": total - free,
    }


def _print_table(report: dict[str, Any], rows: list[BenchRow]) -> None:
    print(f"{report['model']} on {report['device']} (driver {report['driver']})")
    print(f"read bandwidth B = {report['read_bandwidth_bytes_per_second'] / 1e9:,.1f} GB/s")
    print("| test | tokens/s | ms/token | MB/token | GB/s | of B |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.test} | {row.tokens_per_second:.2f} ± {row.deviation:.2f} "
            f"| {row.ms_per_token:.3f} | {_bandwidth_cells(row)} |"
        )


def _bandwidth_cells(row: BenchRow) -> str:
    if row.bytes_per_token is None or row.bandwidth_share is None:
        return "- | - | -"
    rate = row.bytes_per_token * row.tokens_per_second
    return f"{row.bytes_per_token / 1e6:,.1f} | {rate / 1e9:,.1f} | {row.bandwidth_share:.1%}"


def _print_profile(profile: Sequence[ProfileRow]) -> None:
    print("\n| launches of a decode step | calls | us | MB | GB/s | of B |")
    print("|---|---|---|---|---|---|")
    for row in profile:
        print(
            f"| {row.role} | {row.calls} | {row.microseconds:.1f} | {row.bytes_moved / 1e6:.1f} "
            f"| {row.gb_per_s:,.1f} | {row.share:.1%} |"
        )
    total = sum(row.microseconds for row in profile)
    print(f"| all, one after the other | {sum(r.calls for r in profile)} | {total:.1f} | | | |")
