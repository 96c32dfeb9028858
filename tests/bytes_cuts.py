"""Times of products of bytes on a GPU, for each way to cut them, beside those of f16.

    PYTHONPATH=.src python tests/bytes_cuts.py [vectors ...]

Prints microseconds and TOP/s of the matrices of an 8B Q4_K_M model; the chosen cut is marked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from urdir.driver import Device, execute
from urdir.driver.memory import Buffer
from urdir.driver.plan import Plan
from urdir.driver.stream import Stream
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.linear.bytes_choice import any_cut, choose_bytes, estimate, ways
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.kernels.linear.packed_choice import choose_packed
from urdir.ptxgen.kernels.linear.products.gemm_bytes import GemmBytes
from urdir.ptxgen.kernels.linear.products.packed_tiling import PackedTiling
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import KernelSpec, Param
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout

Q4, Q6 = FORMATS["Q4_K"], FORMATS["Q6_K"]
#: Name, rows, columns, steps and other matrices.
SHAPES = (
    ("qkv", Q4, 4096, 4096, (), ((Q4, 1024), (Q6, 1024))),
    ("o", Q4, 4096, 4096, (Residual(),), ()),
    ("gate-up", Q4, 14336, 4096, (Gated(),), ()),
    ("down", Q6, 4096, 14336, (Residual(),), ()),
)
RUNS, LAUNCHES = 5, 8


def times_of(device: Device, specs: Sequence[KernelSpec]) -> list[float]:
    """us of a launch of each of some kernels with the same parameters, in a row of launches."""
    device.load_all([*specs])
    with ExitStack() as owners:
        buffers = {}
        for param in specs[0].params:
            buffer = owners.enter_context(device.allocate(specs[0].nbytes(param), param.name))
            fill(buffer, values(specs[0], param))
            buffers[param.name] = buffer
        stream = owners.enter_context(device.create_stream())
        return [1e3 * median(_runs(device, spec, buffers, stream)) for spec in specs]


def _runs(
    device: Device, spec: KernelSpec, buffers: Mapping[str, Buffer], stream: Stream
) -> Iterator[float]:
    plan = Plan("times")
    for number in range(LAUNCHES):
        plan.launch(spec, f"{spec.name} {number}", **buffers)
    execute.profile(plan, device, stream)
    for _ in range(RUNS):
        yield median(row.ms for row in execute.profile(plan, device, stream))


def values(spec: KernelSpec, param: Param) -> Any:
    """Values like those of a model, some of them."""
    rng = np.random.default_rng(0)
    if isinstance(spec, PackedTiling) and param.name != "y":
        for part in spec.parts:
            few = Layout(part.format, 64, part.layout.cols)
            packed = few.pack(random_blocks(part.format, 64 * few.cols // part.format.block, rng))
            if param.name in (f"weights{part.suffix}", "up"):
                return packed[: few.tiles_nbytes]
            if param.name in (f"row_scales{part.suffix}", "up_row_scales"):
                scales = eights.row_scales(few, packed)
                return np.repeat(scales.mean(axis=1), part.layout.bands * 16).astype(np.float32)
    noise = rng.standard_normal(1 << 20)
    return (32 * noise if param.dtype == "s8" else noise).astype(param.numpy_dtype)


def fill(buffer: Buffer, some: Any) -> None:
    """The same bytes again and again."""
    noise = some.reshape(-1).view(np.uint8)
    for at in range(0, buffer.nbytes, len(noise)):
        buffer.upload(noise[: buffer.nbytes - at], at)


def main() -> None:
    """Print the table."""
    with Device.open("cuda") as device:
        limits = device_limits(device)
        for batch in [int(a) for a in sys.argv[1:]] or [2048, 512, 128]:
            for name, fmt, rows, cols, steps, others in SHAPES:
                f16 = choose_packed(limits, fmt, rows, cols, batch, *steps, others=others)
                (us,) = times_of(device, [f16])
                print(f"{batch} {name}: f16 {us:.1f} us, {f16.flops() / us / 1e6:.0f} TFLOP/s")
                first = GemmBytes.of(fmt, rows, cols, batch, any_cut(batch), *steps, others=others)
                chosen, found = choose_bytes(first, limits.sms), ways(first, limits.sms)
                for way, us in zip(found, times_of(device, found), strict=True):
                    cut, mark = way.cut, " <- chosen" if way.cut == chosen.cut else ""
                    print(
                        f"    {cut.row_groups} {cut.vectors:3} shared {cut.sharers}"
                        f" columns {cut.cluster} {cut.weight_stages}/{cut.x_stages} {cut.sets}:"
                        f" {us:7.1f} us, {way.flops() / us / 1e6:5.0f} TOP/s,"
                        f" estimate {estimate(way, limits.sms):7.1f}{mark}",
                        flush=True,
                    )
            for spec in (
                PackBytes(batch, 4096, Norm("rms", 1e-5)),
                PackBytes(batch, 4096),
                PackBytes(batch, 4096, packed=True),
                PackBytes(batch, 14336, packed=True),
            ):
                print(f"{batch} {spec}: {times_of(device, [spec])[0]:.1f} us", flush=True)


if __name__ == "__main__":
    main()
