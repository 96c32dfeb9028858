"""Speed of a model on a device, beside the read bandwidth that the device has at that moment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.model.attention import key_bucket
from urdir.model.profile import ProfileRow, summarise
from urdir.model.rows import Ending, StepShape
from urdir.model.session import Session
from urdir.ptxgen.kernels.read_stream import ReadStream
from urdir.ptxgen.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.config import Config
    from urdir.model.model_file import ModelFile

#: Sizes the read-only kernel is timed on: the best one counts. Large enough on a GPU to leave
#: launch costs and its L2 cache behind; small on the emulator, whose "bandwidth" is the host's.
GPU_READ_BYTES = (1 << 30, 2 << 30, 4 << 30)
EMULATOR_READ_BYTES = (1 << 22,)
_READS = 6


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured case, named as llama-bench names them (``pp512``, ``tg128``).

    ``bytes_per_token`` and ``bandwidth_share`` are those of decoding; a prompt's tokens share one
    reading of the weights, and have none.
    """

    test: str
    tokens_per_second: float
    deviation: float
    ms_per_token: float
    bytes_per_token: int | None = None
    bandwidth_share: float | None = None


def read_bandwidth(device: Device) -> float:
    """Bytes per second of a read-only kernel, the best over several sizes and runs."""
    sizes = EMULATOR_READ_BYTES if device.is_emulated else GPU_READ_BYTES
    free, _ = device.memory_info()
    best = 0.0
    for nbytes in (size for size in sizes if size < 0.8 * free):
        best = max(best, _read_once(device, nbytes))
    return best


def _read_once(device: Device, nbytes: int) -> float:
    spec = ReadStream.covering(nbytes, device.properties.sm_count)
    size = spec.nbytes(spec.param("data"))
    with (
        device.allocate(size, "bandwidth input") as data,
        device.allocate(spec.nbytes(spec.param("seen")), "bandwidth output") as seen,
        device.create_stream() as stream,
    ):
        data.fill(0x5A)
        plan = Plan("read bandwidth")
        plan.launch(spec, "read", data=data, seen=seen)
        timings = [execute.profile(plan, device, stream)[0] for _ in range(_READS)]
        return max(size / (timing.ms * 1e-3) for timing in timings)


def bytes_per_token(gguf: ModelFile, config: Config, layout: KvLayout, depth: int) -> int:
    """Bytes a decode step must read: every weight once as stored in the file (the embedding table
    only where it is the output matrix), and the keys and values of ``depth`` positions once.
    """
    weights = sum(
        t.nbytes for t in gguf.tensors.values() if t.name != "token_embd.weight" or config.tied
    )
    return weights + 2 * config.n_layers * depth * layout.token_nbytes


def bench(
    session: Session,
    gguf: ModelFile,
    bandwidth: float,
    prompt: int,
    generate: int,
    repeats: int,
    depth: int = 0,
) -> Iterator[BenchRow]:
    """Time ``prompt`` tokens fed and ``generate`` tokens decoded greedily, ``repeats`` times each,
    both after ``depth`` tokens of context.

    One untimed run comes first: modules are loaded and graphs recorded in it.
    """
    config, layout = session.parts.config, session.parts.cache.layout
    rng = np.random.default_rng(0)
    session.truncate(0)
    if depth:
        session.feed([int(t) for t in rng.integers(0, config.vocab_size, depth + 1)])
    for name, count in (("pp", prompt), ("tg", generate)):
        if not count:
            continue
        run = _feed if name == "pp" else _decode
        tokens = [int(t) for t in rng.integers(0, config.vocab_size, count)]
        run(session, tokens, depth)
        seconds = [run(session, tokens, depth) for _ in range(repeats)]
        rates = [count / s for s in seconds]
        row = BenchRow(
            test=f"{name}{count}" + (f" @ d{depth}" if depth else ""),
            tokens_per_second=mean(rates),
            deviation=stdev(rates) if len(rates) > 1 else 0.0,
            ms_per_token=1e3 * mean(seconds) / count,
        )
        if name == "tg":
            needed = bytes_per_token(gguf, config, layout, depth + count // 2)
            share = needed * row.tokens_per_second / bandwidth
            row = replace(row, bytes_per_token=needed, bandwidth_share=share)
        yield row


def _feed(session: Session, tokens: list[int], depth: int) -> float:
    """Seconds to process every token of a prompt, to the logits of the last."""
    session.truncate(depth)
    start = time.perf_counter()
    session.feed(tokens)
    session.logits_step()
    return time.perf_counter() - start


def _decode(session: Session, tokens: list[int], depth: int) -> float:
    """Seconds to decode ``len(tokens)`` tokens greedily after one that is given."""
    session.truncate(depth)
    session.feed(tokens[:1])
    stream = session.stream(Ending.GREEDY)
    start = time.perf_counter()
    for _ in tokens:
        next(stream)
    seconds = time.perf_counter() - start
    stream.close()  # undoes the steps that ran ahead
    return seconds


def profile_step(session: Session, bandwidth: float) -> Sequence[ProfileRow]:
    """Time each launch of a greedy step after a prompt of one, by role; the median of a few runs.

    Runs the step eagerly on the session, which is empty afterwards.
    """
    session.truncate(0)
    session.feed([0])
    device = session.weights.device
    with device.create_stream() as stream:
        shape = StepShape(1, key_bucket(1, session.parts.cache.layout.max_len), Ending.GREEDY)
        timings = execute.profile(session.steps.bound(shape), device, stream, repeats=_READS)
    session.truncate(0)
    return summarise(timings, bandwidth)
