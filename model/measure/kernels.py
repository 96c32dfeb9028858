"""Matrix-vector products by themselves, beside a read-only kernel on as many bytes.

Launches run in a chain, each over another copy of the weights and after the one before, so that
weights always come from memory: a graph of plain edges, timed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.linear.choice import LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.kernels.read_stream import ReadStream
from urdir.ptxgen.weights.formats import FORMATS

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.kernel import Kernel
    from urdir.driver.memory import Buffer, Slice
    from urdir.driver.stream import Stream

    Arguments = Callable[[int], dict[str, Slice]]

TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16")
#: (rows, cols): Q, K and V of an 8B Llama, gate and up, down, output.
GPU_SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
EMULATOR_SHAPES = ((48, 512), (8, 1024))
#: Bytes of weights that a chain reads in turn: far more than any L2 cache holds.
GPU_TURN_BYTES, EMULATOR_TURN_BYTES = 500_000_000, 100_000
_ALIGNMENT = 256
_CHAINS = 7
_NOISE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class GemvRow:
    """One product y = W x, W (rows, cols); ``weight_bytes`` are those of W.

    Microseconds are those of a launch in its chain: the ``best`` chain and the ``median`` one.
    ``read_us`` is what the best of a few read-only kernels takes for as many bytes in a chain of
    the same kind; ``share`` is that over ``best_us``.
    """

    type: str
    rows: int
    cols: int
    weight_bytes: int
    launches: int
    best_us: float
    median_us: float
    gb_per_s: float
    read_us: float
    share: float


def bench_gemv(
    device: Device,
    types: Sequence[str] = TYPES,
    shapes: Sequence[tuple[int, int]] | None = None,
    turn_bytes: int | None = None,
) -> Iterator[GemvRow]:
    """Time the product of every type and shape, in launches that run ``alone``.

    Otherwise they are as in decode steps: 16-bit activations where weights are quantised, a
    residual where there are fewer rows than columns (as in ffn_down). There is no norm.

    Shapes and ``turn_bytes`` default to those of an 8B model on a GPU, to tiny ones on the
    emulator. Raises OutOfMemoryError where a few copies of the largest matrix have no room.
    """
    if shapes is None:
        shapes = EMULATOR_SHAPES if device.is_emulated else GPU_SHAPES
    if turn_bytes is None:
        turn_bytes = EMULATOR_TURN_BYTES if device.is_emulated else GPU_TURN_BYTES
    limits = device_limits(device)
    specs = [
        choose_linear(
            LinearRequest(
                limits,
                ((FORMATS[name], rows),),
                cols,
                steps=(Residual(),) if cols > rows else (),
                alone=True,
            )
        )
        for name in types
        for rows, cols in shapes
    ]
    readers = {spec: _readers(spec.layout.tiles_nbytes, limits.sms) for spec in specs}
    room = max(_copies(spec, turn_bytes) * _stride(spec) for spec in specs)
    every = [reader for each in readers.values() for reader in each]
    beyond = max(4 * reader.words for reader in every)
    with (
        device.allocate(room + beyond, "weights") as pool,
        device.allocate(max(map(_vector_bytes, specs)), "vectors") as vectors,
        device.allocate(max(4 * reader.lanes for reader in every), "seen") as seen,
        device.create_stream() as stream,
    ):
        _fill_with_noise(pool)
        numbers = np.random.default_rng(1).standard_normal(vectors.nbytes // 4)
        vectors.upload(numbers.astype(np.float32))
        for spec in specs:
            count = _copies(spec, turn_bytes)
            times = _chain_us(device, stream, spec, _arguments(spec, pool, vectors), count)
            read_us = min(
                _read_us(device, stream, spec, reader, pool=pool, seen=seen, count=count)
                for reader in readers[spec]
            )
            yield _row(spec, count, times, read_us)


def _row(spec: LinearSpec, count: int, times: Sequence[float], read_us: float) -> GemvRow:
    nbytes, best = spec.layout.tiles_nbytes, min(times)
    return GemvRow(
        type=spec.format.name,
        rows=spec.rows,
        cols=spec.cols,
        weight_bytes=nbytes,
        launches=count,
        best_us=best,
        median_us=median(times),
        gb_per_s=nbytes / best / 1e3,
        read_us=read_us,
        share=read_us / best,
    )


def _stride(spec: LinearSpec) -> int:
    return -(-spec.layout.nbytes // _ALIGNMENT) * _ALIGNMENT


def _copies(spec: LinearSpec, turn_bytes: int) -> int:
    return max(2, -(-turn_bytes // _stride(spec)))


def _vector_bytes(spec: LinearSpec) -> int:
    """Room for all parameters but the weights, each aligned."""
    return sum(spec.nbytes(p) + _ALIGNMENT for p in spec.params if p.name != "weights")


def _arguments(spec: LinearSpec, pool: Buffer, vectors: Buffer) -> Arguments:
    """The i-th copy of the weights, and the same vectors every time."""
    fixed: dict[str, Slice] = {}
    at = 0
    for p in spec.params:
        if p.name != "weights":
            fixed[p.name] = vectors.slice(at, spec.nbytes(p))
            at += -(-spec.nbytes(p) // _ALIGNMENT) * _ALIGNMENT
    return lambda i: {"weights": pool.slice(i * _stride(spec), spec.layout.nbytes), **fixed}


def _readers(nbytes: int, sm_count: int) -> list[ReadStream]:
    """Read-only kernels for ``nbytes``: those that read at most 5 % more, or the closest one."""
    found = []
    for ctas in (1, 2, 4):
        for unroll in (1, 2, 4, 8):
            once = ReadStream(ctas * sm_count, 1, unroll=unroll)
            found.append(ReadStream(once.ctas, -(-nbytes // (4 * once.words)), unroll=unroll))
    close = [r for r in found if 4 * r.words <= 1.05 * nbytes]
    return close or [min(found, key=lambda r: r.words)]


def _read_us(
    device: Device,
    stream: Stream,
    spec: LinearSpec,
    reader: ReadStream,
    pool: Buffer,
    seen: Buffer,
    count: int,
) -> float:
    """Microseconds that ``reader`` takes for the bytes of ``spec``'s weights."""
    size = 4 * reader.words
    lanes = seen.slice(0, 4 * reader.lanes)

    def arguments(i: int) -> dict[str, Slice]:
        return {"data": pool.slice(i * _stride(spec), size), "seen": lanes}

    best = min(_chain_us(device, stream, reader, arguments, count))
    return best * spec.layout.tiles_nbytes / size


def _chain_us(
    device: Device, stream: Stream, kernel: Kernel, arguments: Arguments, count: int
) -> list[float]:
    """Microseconds a launch of a chain of ``count`` launches, one figure a run, the first left out;
    ``arguments(i)`` of the i-th.
    """
    plan = Plan(f"chain of {kernel.name}")
    for i in range(count):
        plan.launch(kernel, f"launch {i}", **arguments(i))
    times = []
    with execute.record(plan, device, programmatic=False) as graph:
        for _ in range(_CHAINS + 1):
            start = stream.record()
            graph.launch(stream)
            times.append(1e3 * stream.record().elapsed_ms_since(start) / count)
    return times[1:]


def _fill_with_noise(pool: Buffer) -> None:
    size = min(_NOISE_BYTES, pool.nbytes // 2 * 2)
    noise = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    noise.view(np.uint16)[:] &= 0xBBFF  # no infinities or NaNs among f16 weights and scales
    for at in range(0, pool.nbytes, size):
        pool.upload(noise[: pool.nbytes - at], at)
