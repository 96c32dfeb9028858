"""`urdir bench`: speed beside the device's read bandwidth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import bench_report as report
from urdir.model.commands import options
from urdir.model.commands.opening import open_device, open_engine
from urdir.model.commands.report import installed_version

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.synthetic import SyntheticModel

EXAMPLES = """\
  urdir bench model.gguf                     512 prompt tokens, 128 decoded, five runs each
  urdir bench model.gguf -p 0 -n 64 -d 32768 decoding after 32,768 tokens of context
  urdir bench model.gguf -p 0 -b 1,4,8       decoding by one, four and eight sequences at once
  urdir bench --shape llama-3.1-8b --type q8_0   no file: random weights of a real shape
  urdir bench model.gguf --profile --plot roofline.png   where the time of a decode step goes
  urdir bench --kernels -o csv               single matrix-vector products
  urdir bench model.gguf --startup           compiling, loading, first token
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "bench", run, "measure prompt and decode speed", EXAMPLES
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("model", nargs="?", metavar="FILE", help="model file (default: demo model)")
    model.add_argument("--shape", metavar="NAME", help="a model of this shape, random weights")
    parser.add_argument("--type", metavar="TYPE", help="its weights (as published: mostly q4_k_m)")
    options.add_quantize(parser)
    count, positive = options.whole_number(0), options.whole_number(1)
    parser.add_argument("-p", "--n-prompt", type=count, default=512, metavar="N", help="(512)")
    parser.add_argument("-n", "--n-gen", type=count, default=128, metavar="N", help="(128)")
    parser.add_argument(
        "-d", "--depth", type=count, default=0, metavar="N", help="tokens of context before (0)"
    )
    parser.add_argument("-r", "--repetitions", type=positive, default=5, metavar="N", help="(5)")
    parser.add_argument(
        "-b",
        "--sequences",
        type=_counts,
        default=(1,),
        metavar="N,N,...",
        help="sequences that are decoded together, a row for each number (1)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--kernels", action="store_true", help="time matrix-vector products instead of a model"
    )
    instead.add_argument(
        "--startup", action="store_true", help="time the way to the first token instead"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also time a decode step launch by launch, of each number of sequences",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw that profile as a roofline"
    )
    parser.add_argument(
        "-o", "--output", choices=report.FORMATS, default="md", help="how to print it (md)"
    )
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.measure.profile import check_can_plot

    if args.plot:
        check_can_plot()
    if args.kernels:
        return _run_kernels(args)
    return _run_startup(args) if args.startup else _run_model(args)


def _run_model(args: argparse.Namespace) -> int:
    from urdir.model.measure.bandwidth import read_bandwidth
    from urdir.model.measure.bench import BenchCase, bench, profile_step
    from urdir.model.measure.profile import plot_roofline

    case = BenchCase(args.n_prompt, args.n_gen, args.depth, args.repetitions, args.sequences)
    with open_engine(args, _source(args), case.context, sequences=max(case.sequences)) as engine:
        bandwidth = read_bandwidth(engine.device)
        _warn(engine.device, bandwidth)
        rows = []
        for row in bench(engine.session, engine.gguf, bandwidth, case):
            print(f"{row.test}: {row.tokens_per_second:.1f} tokens/s", file=sys.stderr)
            rows.append(row)
        sections = [report.Section("rows", rows, report.ROW_COLUMNS)]
        if args.profile or args.plot:
            profile = [
                row
                for count in case.sequences
                for row in profile_step(engine.session, bandwidth, count)
            ]
            sections.append(report.Section("profile", profile, report.PROFILE_COLUMNS))
            if args.plot:
                title = f"decode step of {engine.name} on {engine.device.properties.name}"
                plot_roofline(profile, bandwidth, title, args.plot)
        conditions = _conditions(engine.device, engine.name, bandwidth)
    report.print_report(conditions, sections, args.output)
    return 0


def _run_kernels(args: argparse.Namespace) -> int:
    from urdir.model.measure.bandwidth import read_bandwidth
    from urdir.model.measure.kernels import bench_gemv

    with open_device(args) as device:
        bandwidth = read_bandwidth(device)
        _warn(device, bandwidth)
        rows = []
        for row in bench_gemv(device):
            print(f"{row.type} {row.rows} x {row.cols}: {row.share:.1%}", file=sys.stderr)
            rows.append(row)
        conditions = _conditions(device, "matrix-vector products", bandwidth)
    section = report.Section("matvecs", rows, report.GEMV_COLUMNS)
    report.print_report(conditions, [section], args.output)
    return 0


def _run_startup(args: argparse.Namespace) -> int:
    from urdir.model.environment import read_environment
    from urdir.model.measure.bandwidth import read_bandwidth
    from urdir.model.measure.startup import bench_startup

    environment = read_environment()
    rows = bench_startup(_source(args), args.device or environment.device, environment.cache_dir)
    with open_device(args) as device:
        bandwidth = read_bandwidth(device)
        _warn(device, bandwidth)
        model = args.shape or Path(args.model or "the demo model").name
        conditions = _conditions(device, model, bandwidth)
    section = report.Section("startup", rows, report.STARTUP_COLUMNS)
    report.print_report(conditions, [section], args.output)
    return 0


def _source(args: argparse.Namespace) -> str | SyntheticModel | None:
    from urdir.model.families.synthetic import SyntheticModel

    return SyntheticModel(args.shape, args.type) if args.shape else args.model


def _warn(device: Device, bandwidth: float) -> None:
    from urdir.model.measure.bandwidth import doubt

    if device.is_emulated:
        print("no GPU: these are figures of the emulator", file=sys.stderr)
    if reason := doubt(device.properties.name, bandwidth):
        print(f"warning: {reason}", file=sys.stderr)


def _conditions(device: Device, model: str, bandwidth: float) -> report.Conditions:
    free, total = device.memory_info()
    return report.Conditions(
        model=model,
        device=device.properties.name,
        emulated=device.is_emulated,
        driver=".".join(map(str, device.properties.driver_version)),
        version=installed_version("urdir"),
        read_gb_per_s=bandwidth / 1e9,
        vram_bytes=total - free,
    )


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 1 on, separated by commas."""
    number = options.whole_number(1)
    return tuple(number(part) for part in text.split(","))
