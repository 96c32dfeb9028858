"""`urdir ptx stats`: registers, occupancy, instruction mix and roofline bound of kernels."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urdir.driver.parallel import cores
from urdir.model.commands import options, values
from urdir.model.commands.ptx import arguments
from urdir.model.commands.report import roles_text
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from concurrent.futures import Future

    from urdir.model.measure.model_kernels import ModelKernel
    from urdir.ptxgen.spec import KernelSpec
    from urdir.ptxgen.tools.assemble import Assembly
    from urdir.ptxgen.tools.gpus import Gpu
    from urdir.ptxgen.tools.stats import KernelStats

EXAMPLES = """\
  urdir ptx stats normalise --set cols=4096 --gpu h200       one kernel on an H200
  urdir ptx stats --model model.gguf                        every kernel of a model, as a table
  urdir ptx stats --model model.gguf --plot kernels.png     registers, occupancy and bound of each
  urdir ptx stats gemm --set format=Q4_K --bandwidth 2e12 --flops 100e12
  urdir ptx stats --gpus                                    the GPUs that --gpu knows
"""


def add_parser(commands: options.Subparsers) -> None:
    """Declare the subcommand."""
    parser = options.add_command(
        commands, "stats", run, "show what kernels cost and what bounds them", EXAMPLES
    )
    arguments.add_kernel(parser)
    arguments.add_model(parser)
    arguments.add_all(parser)
    arguments.add_target(parser)
    for name, unit in (("--bandwidth", "bytes"), ("--flops", "operations")):
        parser.add_argument(
            name, type=values.real_number(1), metavar="N", help=f"{unit} a second, for the bound"
        )
    parser.add_argument("--gpus", action="store_true", help="list the known GPUs and their figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw registers, occupancy and bound"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from urdir.model.commands.ptx import stats_report as report
    from urdir.model.measure.plot import check_can_plot

    if args.gpus:
        _print_gpus(args.json)
        return 0
    arguments.check_kernel(args, "stats")
    if args.plot:
        check_can_plot()
    gpu = _gpu(args)
    kernels: Sequence[ModelKernel] = ()
    if args.model is None:
        specs = [arguments.one_kernel(args)]
    else:
        kernels = arguments.of_model(args, gpu, args.all)
        specs = [kernel.spec for kernel in kernels]
    found = _measure_all(specs, args.target or gpu.native_target, gpu)
    if args.json:
        rows = [_as_dict(stats, gpu) for stats in found]
        for row, kernel in zip(rows, kernels, strict=False):
            row |= kernel.as_dict()
        print(json.dumps(rows, indent=2))
    elif args.model is None:
        report.print_kernel(found[0], gpu)
    else:
        report.print_steps(kernels, found, gpu)
        print()
        report.print_kernels(kernels, found)
    if args.plot:
        _plot(args, kernels, found, gpu)
    return 0


def _gpu(args: argparse.Namespace) -> Gpu:
    """The GPU, with the figures that the command line has in place of its own."""
    gpu = arguments.gpu(args)
    if args.bandwidth is not None:
        gpu = dataclasses.replace(gpu, bandwidth=args.bandwidth)
    if args.flops is not None:
        gpu = dataclasses.replace(gpu, flops=args.flops, tensor_flops=args.flops)
    return gpu


def _measure_all(specs: Sequence[KernelSpec], target: str, gpu: Gpu) -> list[KernelStats]:
    from concurrent.futures import ThreadPoolExecutor

    from urdir.ptxgen.tools.assemble import assemble, is_available
    from urdir.ptxgen.tools.stats import measure

    assembled = is_available()
    if not assembled:
        print(
            "no registers, code size and occupancy: they need nvJitLink, "
            "pip install 'urdir[assemble]'",
            file=sys.stderr,
        )
    # The assembler releases the interpreter: every core assembles while the next text is rendered.
    with (
        Progress("measuring", len(specs)) as progress,
        ThreadPoolExecutor(max_workers=cores()) as assembler,
    ):
        jobs: list[tuple[KernelSpec, str, Future[Assembly] | None]] = []
        for spec in specs:
            text = spec.ptx(target)
            job = assembler.submit(assemble, text, target, name=spec.name) if assembled else None
            jobs.append((spec, text, job))
        return [
            measure(spec, target, gpu, text, job.result() if job else None)
            for spec, text, job in progress.over(jobs)
        ]


def _as_dict(stats: KernelStats, gpu: Gpu) -> dict[str, Any]:
    from urdir.ptxgen.tools.dump import describe

    return describe(stats.spec, stats.target) | {"gpu": gpu.name} | stats.as_dict()


def _print_gpus(as_json: bool) -> None:
    from urdir.model.commands.ptx.stats_report import print_gpus
    from urdir.ptxgen.tools.gpus import GPUS

    if as_json:
        print(json.dumps([dataclasses.asdict(gpu) for gpu in GPUS.values()], indent=2))
    else:
        print_gpus([*GPUS.values()])


def _plot(
    args: argparse.Namespace,
    kernels: Sequence[ModelKernel],
    found: Sequence[KernelStats],
    gpu: Gpu,
) -> None:
    from urdir.model.measure.kernel_plot import KernelBar, plot_kernels

    if kernels:
        bars = [
            KernelBar(f"{roles_text(k.roles)}: {s.spec.name} ({k.used_in()})", k.most_launches, s)
            for k, s in zip(kernels, found, strict=True)
        ]
    else:
        bars = [KernelBar(s.spec.name, 1, s) for s in found]
    plot_kernels(bars, f"{args.kernel or args.model} on {gpu.title}", args.plot)
    print(f"{args.plot} written", file=sys.stderr)
