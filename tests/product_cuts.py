"""Times of products on a GPU, for each way to cut them, beside the estimates that choose one.

    PYTHONPATH=.src python tests/product_cuts.py f16|bytes|e4m3 TYPE [vectors ...]
    PYTHONPATH=.src python tests/product_cuts.py f16|bytes|e4m3 TYPE cliffs

Prints microseconds and TOP/s of the matrices of an 8B model; the chosen cut is marked. TYPE is a
type of weights, or Q4_K_M. Launches form a chain with programmatic edges, as in a step; weights
come from memory, not from L2. "cliffs" needs no GPU: it estimates all four products of 64 to 2,304
vectors, and prints where eight more cost 3 % more of each vector, or 6 % more than fewer do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from urdir.driver import Device, execute
from urdir.driver.memory import Slice
from urdir.driver.plan import Plan
from urdir.driver.stream import Stream
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.linear import bytes_choice, wgmma_choice
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_bytes import GemmBytes
from urdir.ptxgen.kernels.linear.products.gemm_e4m3 import GemmE4m3
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.steps import in_order
from urdir.ptxgen.spec import Param, ceil_div
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.e4m3 import to_e4m3
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout

RUNS, LAUNCHES = 4, 12
#: Bytes of weights that do not stay in L2.
COLD = 180 << 20
Way = PackedProduct


def shapes(kind: str) -> Iterator[tuple[str, Format, int, int, tuple[Any, ...], Any]]:
    """Name, type, rows, columns, steps and other matrices of each product of a layer."""
    most, more = ("Q4_K", "Q6_K") if kind == "Q4_K_M" else (kind, kind)
    first, second = FORMATS[most], FORMATS[more]
    yield "qkv", first, 4096, 4096, (), ((first, 1024), (second, 1024))
    yield "o", first, 4096, 4096, (Residual(),), ()
    yield "gate-up", first, 14336, 4096, (Gated(), PackedVectors()), ()
    yield "down", second, 4096, 14336, (Residual(),), ()


def f16_ways(sms: int, batch: int, *of: Any, others: Any) -> tuple[Sequence[Way], Way]:
    """The ways of a product of f16, and the chosen one."""
    fmt, rows, cols, steps = of
    cut = wgmma_choice.any_cut(batch)
    product = GemmWgmma.of(fmt, rows, cols, batch, cut, *in_order(GemmWgmma, *steps), others=others)
    return wgmma_choice.ways(product, sms), wgmma_choice.choose_wgmma(product, sms)


def bytes_ways(
    sms: int, batch: int, *of: Any, others: Any, kernel: type[GemmBytes] = GemmBytes
) -> tuple[Sequence[Way], Way]:
    """The same of bytes."""
    fmt, rows, cols, steps = of
    left = (step for step in steps if not isinstance(step, PackedVectors))
    cut = bytes_choice.any_cut(batch)
    product = kernel.of(fmt, rows, cols, batch, cut, *left, others=others)
    return bytes_choice.ways(product, sms), bytes_choice.choose_bytes(product, sms)


KINDS: dict[str, tuple[Callable[..., tuple[Sequence[Way], Way]], Callable[..., float]]] = {
    "f16": (f16_ways, wgmma_choice.estimate),
    "bytes": (bytes_ways, bytes_choice.estimate),
    "e4m3": (partial(bytes_ways, kernel=GemmE4m3), bytes_choice.estimate),
}


def print_cliffs(arithmetic: str, kind: str) -> None:
    """By the estimates: where all products of some vectors take much more of each than fewer."""
    ways_of, estimate = KINDS[arithmetic]
    before, least, sms = math.inf, math.inf, GPUS["h200"].sm_count
    for batch in range(64, 2305, 8):
        us = 0.0
        for _, *of, others in shapes(kind):
            us += estimate(ways_of(sms, batch, *of, others=others)[1], sms)
        each = us / batch
        if each > 1.03 * before or each > 1.06 * least:
            more = f"{each / before - 1:+.1%} of {batch - 8}, {each / least - 1:+.1%} of the least"
            print(f"{batch}: {us:.1f} us, {1e3 * each:.0f} ns a vector, {more}")
        before, least = each, min(least, each)


def times_of(device: Device, stream: Stream, ways: Sequence[Way]) -> Iterator[float]:
    """us of a launch of each of some kernels with the same parameters."""
    first = ways[0]
    sizes = {param.name: first.nbytes(param) for param in first.params}
    weights = [name for name in sizes if name.startswith(("weights", "up"))]
    copies = min(16, ceil_div(COLD, sum(sizes[name] for name in weights)))
    device.load_all([*ways])
    with ExitStack() as owners:
        pools: dict[str, list[Slice]] = {}
        for param in first.params:
            count = copies if param.name in weights else 1
            stride = -(-sizes[param.name] // 512) * 512
            pool = owners.enter_context(device.allocate(stride * count, param.name))
            some = values(first, param).reshape(-1).view(np.uint8)
            for at in range(0, pool.nbytes, len(some)):
                pool.upload(some[: pool.nbytes - at], at)
            of = [pool.slice(stride * number, sizes[param.name]) for number in range(count)]
            pools[param.name] = of
        for way in ways:
            plan, launches = Plan("chain"), max(LAUNCHES, copies)
            for number in range(launches):
                memory = {name: of[number % len(of)] for name, of in pools.items()}
                plan.launch(way, f"launch {number}", **memory)
            with execute.record(plan, device) as graph:
                times = []
                for _ in range(RUNS + 1):
                    begin = stream.record()
                    graph.launch(stream)
                    times.append(1e3 * stream.record().elapsed_ms_since(begin) / launches)
            yield min(times[1:])


def values(way: Way, param: Param) -> Any:
    """Values like those of a model, some of them."""
    rng = np.random.default_rng(0)
    for part in way.parts if param.name != "y" else ():
        few = Layout(part.format, 64, part.layout.cols)
        packed = few.pack(random_blocks(part.format, 64 * few.cols // part.format.block, rng))
        if param.name in (f"weights{part.suffix}", "up"):
            return packed[: few.tiles_nbytes]
        if param.name in (f"row_scales{part.suffix}", "up_row_scales"):
            scales = eights.row_scales(few, packed)
            return np.repeat(scales.mean(axis=1), part.layout.bands * 16).astype(np.float32)
    noise = rng.standard_normal(1 << 20)
    if param.name == "x" and param.dtype == "u8":
        return to_e4m3(100 * noise)
    return (32 * noise if param.dtype == "s8" else noise).astype(param.numpy_dtype)


def main() -> None:
    """Print the table."""
    arithmetic, kind, *batches = sys.argv[1:]
    if batches == ["cliffs"]:
        print_cliffs(arithmetic, kind)
        return
    ways_of, estimate = KINDS[arithmetic]
    with Device.open("cuda") as device, device.create_stream() as stream:
        sms = device_limits(device).sms
        for batch in map(int, batches or ("2048", "512", "128")):
            for name, *of, others in shapes(kind):
                ways, chosen = ways_of(sms, batch, *of, others=others)
                print(f"{batch} {name}:")
                found = zip(ways, times_of(device, stream, ways), strict=True)
                for way, us in sorted(found, key=lambda pair: pair[1]):
                    mark = " <- chosen" if way.cut == chosen.cut else ""
                    rate = f"{us:7.1f} us, {way.flops() / us / 1e6:5.0f} TOP/s"
                    print(
                        f"  {rate}, estimate {estimate(way, sms):7.1f}, {way.cut}{mark}", flush=True
                    )


if __name__ == "__main__":
    main()
