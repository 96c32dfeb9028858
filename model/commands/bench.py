"""`urdir bench`: speed beside what the device reads and multiplies at best."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.commands import bench_load, options, values
from urdir.model.commands import bench_report as report
from urdir.model.commands.opening import open_device, open_engine
from urdir.model.commands.report import installed_version
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.engine import Engine
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.measure.bench import BenchCase, BenchRow, Rates
    from urdir.model.measure.profile import ProfileRow

EXAMPLES = """\
  urdir bench model.gguf                     512 prompt tokens, 128 decoded, five runs each
  urdir bench -m model.gguf -p 32,128-512*2 -n 0   prompts of several lengths
  urdir bench model.gguf -p 0 -n 64 -d 0,256     decoding at once and after 256 tokens of context
  urdir bench model.gguf -p 0 -npl 1,8,16-256*2  decoding by several sequences at once
  urdir bench --shape llama-3.1-8b --type q8_0   no file: random weights of a real shape
  urdir bench model.gguf --gpus 2            a half of the model on each of two GPUs
  urdir bench model.gguf --profile --plot roofline.png   where the time of a decode step goes
  urdir bench --kernels -o csv               single matrix-vector products
  urdir bench model.gguf --startup           compiling, loading, first token
  urdir bench --load http://127.0.0.1:8080 --users 64 --input 500 --answer 100-300
  urdir bench --load http://127.0.0.1:8080 --rate 20 --requests 1200 --plot load.png
  urdir bench model.gguf --load --at-once --requests 1000 --input 128   no server: its engine alone
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the command."""
    parser = options.add_command(
        commands, "bench", run, "measure prompt and decode speed", EXAMPLES
    )
    options.add_file(parser, optional=True)
    parser.add_argument("--shape", metavar="NAME", help="a model of this shape, random weights")
    parser.add_argument("--type", metavar="TYPE", help="its weights (as published: mostly q4_k_m)")
    options.add_quantize(parser)
    options.add_llama_flags(parser, "model", "memory", "bench")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--kernels", action="store_true", help="time matrix-vector products instead of a model"
    )
    instead.add_argument(
        "--startup", action="store_true", help="time the way to the first token instead"
    )
    instead.add_argument(
        "--load",
        nargs="?",
        const=True,
        choices=values.Urls(),
        metavar="URL",
        help="measure many requests to a server that speaks OpenAI's protocol instead; without a "
        "URL, to the model in this process",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also time a decode step launch by launch, of each number of sequences",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw that profile, or --load"
    )
    options.add_device(parser)
    options.add_gpus(parser)
    bench_load.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.measure.plot import check_can_plot

    if args.plot:
        check_can_plot()
    if args.load is True:
        return bench_load.run_here(args, _source(args))
    if args.load:
        return bench_load.run(args)
    if args.gpus is not None and (args.kernels or args.startup or args.profile or args.plot):
        raise options.UsageError("--gpus: of several GPUs only the speed of a model is measured")
    if args.kernels:
        return _run_kernels(args)
    return _run_startup(args) if args.startup else _run_model(args)


def _run_model(args: argparse.Namespace) -> int:
    from urdir.model.measure.bench import BenchCase, bench, profile_step
    from urdir.model.measure.profile import plot_roofline

    case = BenchCase(
        prompts=args.n_prompt,
        generate=args.n_gen,
        depths=args.n_depth,
        repeats=args.repetitions,
        sequences=args.sequences,
        pairs=tuple(args.pg),
    )
    rates: Rates | None = None
    rows: list[BenchRow] = []
    profile: list[ProfileRow] = []
    for part in case.parts():
        with _open_engine(args, part) as engine:
            rates = rates or _rates(engine.device)
            with Progress("measuring", part.rows) as progress:
                for row in progress.over(bench(engine.session, engine.gguf, rates, part)):
                    progress.note(f"{row.test}: {row.tokens_per_second:.1f} tokens/s")
                    rows.append(row)
            if args.profile or args.plot:
                for count in part.sequences:
                    profile += profile_step(engine.session, rates.read, count)
            conditions = _conditions(engine.device, engine.name, rates, len(engine.group))
    sections = [report.Section("rows", rows, report.ROW_COLUMNS)]
    if args.profile or args.plot:
        sections.append(report.Section("profile", profile, report.PROFILE_COLUMNS))
    if args.plot:
        title = f"decode step of {conditions.model} on {conditions.device}"
        plot_roofline(profile, conditions.read_gb_per_s * 1e9, title, args.plot)
    report.print_report(conditions, sections, args.output)
    return 0


def _open_engine(args: argparse.Namespace, part: BenchCase) -> Engine:
    return open_engine(
        args,
        _source(args),
        part.context,
        kv_dtype=options.kv_dtype(args),
        sequences=part.most_sequences,
        chunk=options.chunk(args),
    )


def _run_kernels(args: argparse.Namespace) -> int:
    from urdir.model.measure.kernels import bench_gemv

    with open_device(args) as device:
        rates = _rates(device)
        rows = []
        with Progress("measuring") as progress:
            for row in bench_gemv(device):
                progress.note(f"{row.type} {row.rows} x {row.cols}: {row.share:.1%}")
                rows.append(row)
        conditions = _conditions(device, "matrix-vector products", rates)
    section = report.Section("matvecs", rows, report.GEMV_COLUMNS)
    report.print_report(conditions, [section], args.output)
    return 0


def _run_startup(args: argparse.Namespace) -> int:
    from urdir.model.environment import read_environment
    from urdir.model.measure.startup import bench_startup

    environment = read_environment()
    device_name = args.device or environment.device
    with Progress("starting"):
        rows = bench_startup(_source(args), device_name, environment.cache_dir)
    with open_device(args) as device:
        model = args.shape or Path(options.one_model(args) or "the demo model").name
        conditions = _conditions(device, model, _rates(device))
    section = report.Section("startup", rows, report.STARTUP_COLUMNS)
    report.print_report(conditions, [section], args.output)
    return 0


def _source(args: argparse.Namespace) -> str | SyntheticModel | None:
    from urdir.model.families.synthetic import SyntheticModel

    model = options.one_model(args)
    if args.shape and model:
        raise options.UsageError(f"--shape {args.shape} beside a model: give one of them")
    return SyntheticModel(args.shape, args.type) if args.shape else model


def _rates(device: Device) -> Rates:
    """What the device does at best; a warning where that is less than it should be."""
    from urdir.model.measure.bandwidth import doubt, read_bandwidth
    from urdir.model.measure.bench import Rates
    from urdir.model.measure.product_rate import product_rate

    with Progress("measuring the device"):
        rates = Rates(read_bandwidth(device), product_rate(device))
    if device.is_emulated:
        print("no GPU: these are figures of the emulator", file=sys.stderr)
    if reason := doubt(device.properties.name, rates.read):
        print(f"warning: {reason}", file=sys.stderr)
    return rates


def _conditions(device: Device, model: str, rates: Rates, gpus: int = 1) -> report.Conditions:
    """What was measured on what; of several GPUs rates, memory and what moves are those of each."""
    free, total = device.memory_info()
    name = device.properties.name
    return report.Conditions(
        model=model,
        device=name if gpus == 1 else f"each of {gpus} x {name}",
        emulated=device.is_emulated,
        driver=".".join(map(str, device.properties.driver_version)),
        version=installed_version("urdir"),
        read_gb_per_s=rates.read / 1e9,
        product_tflop_per_s=rates.product / 1e12,
        vram_bytes=total - free,
    )
