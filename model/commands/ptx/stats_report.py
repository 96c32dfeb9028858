"""What `urdir ptx stats` prints: known GPUs, a kernel, the kernels of a model and its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from urdir.model.commands.report import extent, fields_text, megabytes_text, roles_text
from urdir.model.commands.table import Column, print_table, wrapped

if TYPE_CHECKING:
    from urdir.model.engine.batch import StepShape
    from urdir.model.measure.model_kernels import ModelKernel
    from urdir.ptxgen.tools.gpus import Gpu
    from urdir.ptxgen.tools.stats import KernelStats

#: A bound below this says nothing: starting a launch takes longer.
_LEAST_MICROSECONDS = 0.001

_GPU_COLUMNS = (
    Column("name"),
    Column("GPU"),
    Column("target"),
    Column("SMs", right=True),
    Column("GB/s", right=True),
    Column("f32 Tflop/s", right=True),
    Column("f16 tensor", right=True),
    Column("source", rank=1),
)
_STEP_COLUMNS = (
    Column("a step of"),
    Column("launches", right=True),
    Column("MB", right=True),
    Column("Mflop", right=True, rank=1),
    Column("us at least", right=True),
    Column("tokens/s at most", right=True),
)
_KERNEL_COLUMNS = (
    Column("what"),
    Column("kernel"),
    Column("grid x block", rank=3),
    Column("regs", right=True),
    Column("spilt", right=True, rank=4),
    Column("shared", right=True, rank=4),
    Column("warps", right=True),
    Column("limited by", rank=3),
    Column("MB", right=True, rank=2),
    Column("us", right=True),
    Column("bound by"),
    Column("a step of", rank=5),
    Column("fields", rank=6, cut=True),
)


def print_gpus(gpus: Sequence[Gpu]) -> None:
    """The figures of their data sheets."""
    rows = [
        (g.name, g.title, g.target, str(g.sm_count), f"{g.bandwidth / 1e9:,.0f}",
         f"{g.flops / 1e12:g}", f"{g.tensor_flops / 1e12:g}", g.source)
        for g in gpus
    ]  # fmt: skip
    print_table(_GPU_COLUMNS, rows)


def print_kernel(stats: KernelStats, gpu: Gpu) -> None:
    """All that is known of one kernel, a line each."""
    for name, value in _facts(stats, gpu):
        print(wrapped(f"{name:<14} {value}", 15))


def _facts(stats: KernelStats, gpu: Gpu) -> Iterator[tuple[str, str]]:
    spec, r, o = stats.spec, stats.resources, stats.occupancy
    shape, bound = spec.launch_shape, stats.bound
    yield "kernel", f"{spec.name}  {fields_text(spec)}"
    yield "target", f"{stats.target}, on {gpu.title}: {gpu.sm_count} SMs"
    yield "launch", f"{extent(shape.grid)} CTAs of {extent(shape.block)} threads"
    if r is not None:
        spilt = r.spill_stores + r.spill_loads
        yield "registers", f"{r.registers} a thread, {spilt} bytes spilt, {r.stack} bytes local"
        yield "shared memory", f"{r.shared:,} bytes static, {shape.shared_bytes:,} dynamic"
        yield "barriers", str(r.barriers)
        yield "code", f"{stats.code_bytes or 0:,} bytes"
    if o is not None:
        waves = f", {stats.waves:.2f} waves" if stats.waves is not None else ""
        text = f"{o.share:.0%}: {o.ctas} CTAs, {o.warps} of {o.max_warps} warps an SM"
        yield "occupancy", f"{text}, limited by {o.limiter}{waves}"
    mix = ", ".join(f"{count} {pipe}" for pipe, count in stats.mix.items() if count)
    yield "instructions", f"{sum(stats.mix.values())} in the text: {mix}"
    yield "work", f"{spec.bytes_moved():,} bytes, {spec.flops():,} operations"
    yield (
        "bound",
        f"{_microseconds(bound.seconds)} us by {bound.by} ({gpu.bandwidth / 1e9:,.0f} GB/s; "
        f"{bound.intensity:.2f} operations a byte)",
    )


def print_steps(kernels: Sequence[ModelKernel], found: Sequence[KernelStats], gpu: Gpu) -> None:
    """What the largest decode step and the largest prompt step cost at least, in all."""
    shapes = dict.fromkeys(shape for kernel in kernels for shape in kernel.launches)
    rows = []
    for kind in ("greedy", "prompt greedy"):
        shape = max((s for s in shapes if s.kind == kind), key=lambda s: (s.rows, s.keys))
        pairs = zip(kernels, found, strict=True)
        used = [(k.launches[shape], stats) for k, stats in pairs if shape in k.launches]
        seconds = sum(n * stats.bound.seconds for n, stats in used)
        rows.append(
            (
                _step_text(shape),
                str(sum(n for n, _ in used)),
                f"{sum(n * s.spec.bytes_moved() for n, s in used) / 1e6:,.1f}",
                f"{sum(n * s.spec.flops() for n, s in used) / 1e6:,.1f}",
                f"{seconds * 1e6:,.1f}",
                f"{shape.rows / seconds:,.0f}",
            )
        )
    print(f"on {gpu.title}, if nothing but bandwidth and arithmetic took time:")
    print_table(_STEP_COLUMNS, rows)


def _step_text(shape: StepShape) -> str:
    rows = "1 token" if shape.rows == 1 else f"{shape.rows} tokens"
    return f"{'a prompt, ' if shape.prompt else 'decode, '}{rows}, {shape.keys} keys"


def print_kernels(kernels: Sequence[ModelKernel], found: Sequence[KernelStats]) -> None:
    """A line a kernel; the instructions of each are in the report of a single one."""
    rows = []
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
                megabytes_text(s.spec.bytes_moved()),
                _microseconds(s.bound.seconds),
                s.bound.by,
                kernel.used_in(),
                fields_text(s.spec),
            )
        )
    print_table(_KERNEL_COLUMNS, rows)


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    if 0 < us < _LEAST_MICROSECONDS:
        return f"<{_LEAST_MICROSECONDS}"
    return f"{us:,.0f}" if us >= 1e3 else f"{us:.3g}" if us >= 1 else f"{us:.3f}"
