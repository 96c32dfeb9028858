"""`urdir ptx stats`: registers, occupancy, instruction mix and roofline bound of kernels."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.commands import options, values
from urdir.model.commands.ptx import arguments
from urdir.model.commands.report import aligned, extent, fields_text, fitting, roles_text

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
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.gpus:
        _print_gpus(args.json)
        return 0
    arguments.check_kernel(args, "stats")
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
        _print_one(found[0], gpu)
    else:
        _print_steps(kernels, found, gpu)
        print()
        _print_table(kernels, found)
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
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as assembler:
        jobs: list[tuple[KernelSpec, str, Future[Assembly] | None]] = []
        for spec in specs:
            text = spec.ptx(target)
            job = assembler.submit(assemble, text, target, name=spec.name) if assembled else None
            jobs.append((spec, text, job))
        return [
            measure(spec, target, gpu, text, job.result() if job else None)
            for spec, text, job in jobs
        ]


def _as_dict(stats: KernelStats, gpu: Gpu) -> dict[str, Any]:
    from urdir.ptxgen.tools.dump import describe

    return describe(stats.spec, stats.target) | {"gpu": gpu.name} | stats.as_dict()


def _print_gpus(as_json: bool) -> None:
    from urdir.ptxgen.tools.gpus import GPUS

    if as_json:
        print(json.dumps([dataclasses.asdict(gpu) for gpu in GPUS.values()], indent=2))
        return
    print("| name | GPU | target | SMs | GB/s | f32 Tflop/s | f16 tensor Tflop/s | source |")
    print("|---|---|---|---|---|---|---|---|")
    for g in GPUS.values():
        print(
            f"| {g.name} | {g.title} | {g.target} | {g.sm_count} | {g.bandwidth / 1e9:,.0f} "
            f"| {g.flops / 1e12:g} | {g.tensor_flops / 1e12:g} | {g.source} |"
        )


def _print_one(stats: KernelStats, gpu: Gpu) -> None:
    for name, value in _lines(stats, gpu):
        print(f"{name:<14} {value}")


def _lines(stats: KernelStats, gpu: Gpu) -> list[tuple[str, str]]:
    spec, r, o = stats.spec, stats.resources, stats.occupancy
    shape, bound = spec.launch_shape, stats.bound
    lines = [
        ("kernel", f"{spec.name}  {fields_text(spec)}"),
        ("target", f"{stats.target}, on {gpu.title}: {gpu.sm_count} SMs"),
        ("launch", f"{extent(shape.grid)} CTAs of {extent(shape.block)} threads"),
    ]
    if r is not None:
        spilt = r.spill_stores + r.spill_loads
        lines += [
            ("registers", f"{r.registers} a thread, {spilt} bytes spilt, {r.stack} bytes local"),
            ("shared memory", f"{r.shared:,} bytes static, {shape.shared_bytes:,} dynamic"),
            ("barriers", str(r.barriers)),
            ("code", f"{stats.code_bytes or 0:,} bytes"),
        ]
    if o is not None:
        waves = f", {stats.waves:.2f} waves" if stats.waves is not None else ""
        text = f"{o.share:.0%}: {o.ctas} CTAs, {o.warps} of {o.max_warps} warps an SM"
        lines.append(("occupancy", f"{text}, limited by {o.limiter}{waves}"))
    mix = ", ".join(f"{count} {pipe}" for pipe, count in stats.mix.items() if count)
    lines += [
        ("instructions", f"{sum(stats.mix.values())} in the text: {mix}"),
        ("work", f"{spec.bytes_moved():,} bytes, {spec.flops():,} operations"),
        (
            "bound",
            f"{_microseconds(bound.seconds)} us by {bound.by} ({gpu.bandwidth / 1e9:,.0f} GB/s; "
            f"{bound.intensity:.2f} operations a byte)",
        ),
    ]
    return lines


def _print_table(kernels: Sequence[ModelKernel], found: Sequence[KernelStats]) -> None:
    """A line a kernel; the instructions of each are in the report of a single one."""
    rows = [
        ("what", "kernel", "grid x block", "regs", "spilt", "shared", "occupancy", "by", "MB", "us",
         "bound by", "fields")
    ]  # fmt: skip
    for kernel, s in zip(kernels, found, strict=True):
        r, o, shape = s.resources, s.occupancy, s.spec.launch_shape
        rows.append(
            (
                roles_text(kernel.roles),
                s.spec.name,
                f"{extent(shape.grid)} x {extent(shape.block)}",
                str(r.registers) if r else "-",
                str(r.spill_stores + r.spill_loads) if r else "-",
                "-" if s.shared is None else f"{s.shared:,}",
                f"{o.share:.0%}" if o else "-",
                o.limiter if o else "-",
                f"{s.spec.bytes_moved() / 1e6:,.3f}",
                _microseconds(s.bound.seconds),
                s.bound.by,
                fields_text(s.spec),
            )
        )
    for line in aligned(rows, right=(3, 4, 5, 6, 8, 9)):
        print(fitting(line))


def _print_steps(kernels: Sequence[ModelKernel], found: Sequence[KernelStats], gpu: Gpu) -> None:
    """What the largest decode step and the largest prompt step cost at least, in all."""
    shapes = list(dict.fromkeys(shape for kernel in kernels for shape in kernel.launches))
    rows = [
        (f"a step, on {gpu.title}", "launches", "MB", "Mflop", "us at least", "tokens/s at most")
    ]
    for kind in ("greedy", "prompt greedy"):
        chosen = [s for s in shapes if s.kind == kind]
        shape = max(chosen, key=lambda s: (s.rows, s.keys))
        pairs = zip(kernels, found, strict=True)
        used = [(k.launches[shape], stats) for k, stats in pairs if shape in k.launches]
        seconds = sum(n * stats.bound.seconds for n, stats in used)
        rows.append(
            (
                f"{kind}, {shape.rows} rows, {shape.keys} keys",
                str(sum(n for n, _ in used)),
                f"{sum(n * s.spec.bytes_moved() for n, s in used) / 1e6:,.1f}",
                f"{sum(n * s.spec.flops() for n, s in used) / 1e6:,.1f}",
                f"{seconds * 1e6:,.1f}",
                f"{shape.rows / seconds:,.0f}",
            )
        )
    for line in aligned(rows, right=(1, 2, 3, 4, 5)):
        print(line)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"
