"""The rate of a dense f16 product on a device at the moment: prompts are given as shares of it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.linear.packed_choice import choose_packed, packs
from urdir.ptxgen.kernels.linear.products.gemm import Gemm
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Buffer

#: Rows, columns and batch of the product; on the emulator its rate is the host's.
GPU_SIZE, EMULATOR_SIZE = 8192, 64
_RUNS = 7
_NOISE = 1 << 20  # values


def product_rate(device: Device) -> float:
    """Operations per second of a large product of f16 weights, the median of a few runs, of the
    fastest available kernel; a smaller product if memory is short.
    """
    size = EMULATOR_SIZE if device.is_emulated else GPU_SIZE
    free, _ = device.memory_info()
    while size > EMULATOR_SIZE and 10 * size * size > 0.8 * free:  # f16 weights, x and y in f32
        size //= 2
    spec, f16 = _product(device, size), FORMATS["F16"]
    plan = Plan("dense product")
    x_dtype = spec.param("x").numpy_dtype
    with (
        device.allocate(Layout(f16, size, size).nbytes, "product weights") as weights,
        device.allocate(spec.nbytes(spec.param("x")), "product input") as x,
        device.allocate(4 * size * size, "product output") as y,
        device.create_stream() as stream,
    ):
        noise = np.random.default_rng(0).standard_normal(_NOISE)
        _fill(weights, noise.astype(np.float16).view(np.uint8))
        _fill(x, noise.astype(x_dtype).view(np.uint8))
        plan.launch(spec, "product", weights=weights, x=x, y=y)
        runs = [execute.profile(plan, device, stream)[0].ms for _ in range(_RUNS)]
    return spec.flops() / (1e-3 * median(runs))


def _product(device: Device, size: int) -> Gemm | PackedProduct:
    fmt, limits = FORMATS["F16"], device_limits(device)
    if not packs(limits, (fmt,)):
        return Gemm(fmt, size, size, batch=size)
    return choose_packed(limits, fmt, size, size, size)


def _fill(buffer: Buffer, values: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """The same bytes again and again."""
    for at in range(0, buffer.nbytes, len(values)):
        buffer.upload(values[: buffer.nbytes - at], at)
