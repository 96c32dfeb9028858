"""Speed of a model on a device: prompts, decoding, several sequences at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver import execute
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output
from urdir.model.engine.session import Session
from urdir.model.families.description import Mixture
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.measure.profile import ProfileRow, summarise
from urdir.model.memory.cache_shape import CacheShape
from urdir.ptxgen.kernels.attention.decode import DecodeAttention

if TYPE_CHECKING:
    from urdir.model.families.description import Config
    from urdir.model.files.model_file import ModelFile

_PROFILED = 6  # runs of a step that is profiled


@dataclass(frozen=True, slots=True)
class BenchCase:
    """What to time: ``prompt`` tokens fed, then ``generate`` steps decoded greedily by each number
    of ``sequences``, ``repeats`` times, all after ``depth`` tokens of context.
    """

    prompt: int = 512
    generate: int = 128
    depth: int = 0
    repeats: int = 5
    sequences: tuple[int, ...] = (1,)

    @property
    def context(self) -> int:
        """Tokens of context that it needs."""
        return self.depth + max(self.prompt, self.generate, 2)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured case, named as llama-bench names them (``pp512``, ``tg128``, ``tg64 @ d8192``),
    followed by the number of sequences where it is not one (``tg128 x 4``).

    ``tokens_per_second`` (mean of the runs) and its standard ``deviation`` count the tokens of all
    sequences. ``ms_per_token`` is its inverse, ``ms_per_step`` the time of a step, which makes one
    token of each sequence. With several sequences, what follows is a token's share of a step.

    The rest is for decoding only (None for prompts, whose tokens share one reading of the weights).
    ``bytes_per_token`` must be read (`bytes_per_step`); ``gb_per_s`` is the rate of that, and
    ``share`` its share of the read bandwidth. ``moved_per_token`` bytes are moved according to the
    plan's launches. ``host_us_per_token`` is the wall-clock time of the decoding loop minus the
    time spent waiting for the device: what Python and the driver calls take to queue a step and to
    fetch its token. As long as a step takes longer, the device does not wait for the host.
    """

    test: str
    sequences: int
    tokens_per_second: float
    deviation: float
    ms_per_token: float
    ms_per_step: float | None = None
    bytes_per_token: int | None = None
    moved_per_token: int | None = None
    gb_per_s: float | None = None
    share: float | None = None
    host_us_per_token: float | None = None


def bytes_per_step(
    gguf: ModelFile, config: Config, cache: CacheShape, length: int, sequences: int = 1
) -> int:
    """Bytes a decode step must read: every weight once as stored in the file (the embedding table
    only where it is the output matrix, of a mixture's experts as many as a token uses), and the
    keys and values that a token of each sequence attends to at ``length``, once.
    """
    return weight_bytes(gguf, config) + cache.read_nbytes(length) * sequences


def weight_bytes(gguf: ModelFile, config: Config) -> int:
    """Bytes of the weights that a token needs, as stored in the file."""
    tables = {config.embedding, config.positions} - {config.output.matrix}
    if config.layer_embeddings is not None:
        tables.add(config.layer_embeddings.table)
    shares = {
        stored: mixture.router.used / mixture.router.experts
        for layer in config.layers
        for mixture in layer.networks
        if isinstance(mixture, Mixture)
        for part in (mixture.gate, mixture.up, mixture.down)
        for stored in stored_in(part)
    }
    total = 0.0
    for stored in stored_in(config):
        if stored not in tables:
            whole, values = gguf.tensors[stored.name].nbytes, math.prod(stored.shape)
            share = stored.rows * stored.cols if isinstance(stored, StoredMatrix) else stored.size
            total += whole * share / values * shares.get(stored, 1.0)
    return round(total)


def moved_per_step(plan: Plan, length: int, sequences: int = 1) -> int:
    """Bytes that the launches of a decode step's plan move, by their own account.

    Attention is counted with the ``length`` keys and values that there are, not with all that the
    plan has room for.
    """
    total = 0
    for operation in plan:
        kernel = operation.kernel if isinstance(operation, Launch) else None
        if isinstance(kernel, DecodeAttention):
            others = (u for u in operation.uses() if u.name not in ("k_cache", "v_cache"))
            total += sum(use.stop - use.start for use in others)
            keys = min(length, kernel.scores.span or length)
            total += keys * kernel.layout.pair_nbytes * sequences
        else:
            total += operation.bytes_moved()
    return total


def bench(
    session: Session, gguf: ModelFile, bandwidth: float, case: BenchCase
) -> Iterator[BenchRow]:
    """Time ``case`` on a session with as many sequences; ``bandwidth`` in bytes per
    second.

    One untimed run of each comes first: modules are loaded and graphs recorded in it.
    """
    rng = np.random.default_rng(0)
    vocab = session.parts.config.vocab_size
    at_depth = f" @ d{case.depth}" if case.depth else ""
    session.truncate(0)
    if case.depth:
        session.feed([int(t) for t in rng.integers(0, vocab, case.depth + 1)])
        for other in range(1, max(case.sequences)):
            session.fork(0, other)
    if case.prompt:
        tokens = [int(t) for t in rng.integers(0, vocab, case.prompt)]
        _feed(session, tokens, case.depth)
        seconds = [_feed(session, tokens, case.depth) for _ in range(case.repeats)]
        yield _row(f"pp{case.prompt}{at_depth}", case.prompt, 1, seconds)
    for count in case.sequences if case.generate else ():
        first = [int(t) for t in rng.integers(0, vocab, count)]
        _decode(session, first, case)
        runs = [_decode(session, first, case) for _ in range(case.repeats)]
        name = f"tg{case.generate}" + (f" x {count}" if count > 1 else "") + at_depth
        yield _decode_row(session, gguf, bandwidth, case, test=name, count=count, runs=runs)


def _row(test: str, tokens: int, sequences: int, seconds: Sequence[float]) -> BenchRow:
    rates = [tokens / s for s in seconds]
    deviation = stdev(rates) if len(rates) > 1 else 0.0
    return BenchRow(test, sequences, mean(rates), deviation, 1e3 * mean(seconds) / tokens)


def _decode_row(
    session: Session,
    gguf: ModelFile,
    bandwidth: float,
    case: BenchCase,
    test: str,
    count: int,
    runs: Sequence[tuple[float, float]],
) -> BenchRow:
    row = _row(test, count * case.generate, count, [seconds for seconds, _ in runs])
    config, cache = session.parts.config, session.parts.cache.shape
    length = case.depth + case.generate // 2  # on average
    needed = bytes_per_step(gguf, config, cache, length, count)
    bound = session.steps.bound(session.shapes.decode(count, max(length, 1), Output.GREEDY))
    rate = needed / count * row.tokens_per_second
    return replace(
        row,
        ms_per_step=row.ms_per_token * count,
        bytes_per_token=round(needed / count),
        moved_per_token=round(moved_per_step(bound.plan, length, count) / count),
        gb_per_s=rate / 1e9,
        share=rate / bandwidth,
        host_us_per_token=1e6 * mean(busy for _, busy in runs) / (case.generate * count),
    )


def _feed(session: Session, tokens: list[int], depth: int) -> float:
    """Seconds to process every token of a prompt, to the logits of the last."""
    _rewind(session, depth)
    start = time.perf_counter()
    session.feed(tokens)
    session.logits_step()
    return time.perf_counter() - start


def _rewind(session: Session, depth: int, sequence: int = 0) -> None:
    """Cut a sequence to its first ``depth`` tokens; where layers with a window have lost what the
    next one looks back on, these are processed once more."""
    tokens = session.sequences[sequence].tokens[:depth]
    kept = session.kept(depth, sequence)
    session.truncate(kept, sequence)
    if kept < depth:
        session.feed(tokens, sequence)
        session.forward_gpu_resident((sequence,))


def _decode(session: Session, first: Sequence[int], case: BenchCase) -> tuple[float, float]:
    """Seconds to decode greedily after one token that is given to each sequence, and how many of
    them the host was busy.
    """
    sequences = range(len(first))
    for sequence, token in zip(sequences, first, strict=True):
        _rewind(session, case.depth, sequence)
        session.feed([token], sequence)
    steps = session.stream_together(Output.GREEDY, sequences, most=case.generate)
    with closing(steps) as stream:
        waited, start = session.ahead.waited_seconds, time.perf_counter()
        for _ in stream:
            pass
        seconds = time.perf_counter() - start
        waited = session.ahead.waited_seconds - waited
    return seconds, seconds - waited


def profile_step(session: Session, bandwidth: float, sequences: int = 1) -> Sequence[ProfileRow]:
    """Time each launch of a greedy step of so many sequences, each after a prompt of one, by role;
    the median of a few runs.

    Runs the step eagerly on the session, whose sequences are empty afterwards.
    """
    for sequence in range(sequences):
        session.truncate(0, sequence)
        session.feed([0], sequence)
    session.parts.state.write_rows([(sequence, 0) for sequence in range(sequences)])
    device = session.parts.device
    with device.create_stream() as stream:
        bound = session.steps.bound(session.shapes.decode(sequences, 1, Output.GREEDY))
        timings = execute.profile(bound, device, stream, repeats=_PROFILED)
    for sequence in range(sequences):
        session.truncate(0, sequence)
    return summarise(bound.plan, timings, bandwidth, sequences)
