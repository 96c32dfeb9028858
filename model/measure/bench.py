"""Speed of a model on a device: prompts, decoding, several sequences at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from urdir.driver import execute
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.run_ahead import AT_ONCE, FEW
from urdir.model.engine.session import Session
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.stored import StoredMatrix, StoredVector, stored_in
from urdir.model.measure.profile import ProfileRow, summarise
from urdir.model.measure.timed_answers import Timing, fill, time_answer, time_decoding
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.ptxgen.kernels.attention.decode import DecodeAttention

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile

Run = TypeVar("Run")
_PROFILED = 6  # runs of a step that is profiled


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best: bytes ``read`` per second, and operations per second of a dense
    f16 ``product``."""

    read: float
    product: float


@dataclass(frozen=True, slots=True)
class BenchCase:
    """What to time, each ``repeats`` times after each of the ``depths``, tokens of context: each
    number of ``prompts``, tokens fed; each number of ``generate``, steps decoded greedily by each
    number of ``sequences``; each of ``pairs``, a prompt and steps after it.
    """

    prompts: tuple[int, ...] = (512,)
    generate: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    repeats: int = 5
    sequences: tuple[int, ...] = (1,)
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def context(self) -> int:
        """Tokens of context that each sequence needs."""
        prompts = (*self.prompts, *(p + n for p, n in self.pairs), 2)
        depth, most = max(self.depths, default=0), max(prompts)
        if self.sequences:
            # a token before the first step, at least
            spread = _spread(self.most_sequences) + (depth == 0)
            most = max(most, *(n + spread for n in self.generate if n))
        return depth + most

    @property
    def most_sequences(self) -> int:
        """Sequences that a session needs."""
        return max(self.sequences, default=1)

    def parts(self) -> list[BenchCase]:
        """What one sequence does, and what several do: each for a session of its own, so that
        several need not have room for the longest prompt each."""
        alone = tuple(count for count in self.sequences if count == 1)
        several = tuple(count for count in self.sequences if count > 1)
        parts = (
            replace(self, sequences=alone),
            replace(self, sequences=several, prompts=(), pairs=()),
        )
        return [part for part in parts if part.rows or part.sequences]

    @property
    def rows(self) -> int:
        """Rows that come of it."""
        prompts, decodes = (len([*filter(None, sizes)]) for sizes in (self.prompts, self.generate))
        return len(self.depths) * (prompts + decodes * len(self.sequences) + len(self.pairs))


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured case, named as llama-bench names them (``pp512``, ``tg128``, ``tg64 @ d8192``,
    ``pp512+tg128``), with the number of sequences where it is not one (``tg128 x 4``).

    ``tokens_per_second`` (mean of the runs), its standard ``deviation`` and the ``median`` run
    count the tokens of all sequences. ``ms_per_token`` is the inverse of the mean, ``ms_per_step``
    the time of a step, which makes one token of each sequence. With several sequences, what follows
    is a token's share of a step.

    ``tflop_per_s`` are the operations that the tokens need (`flops_of`), in 10^12 per second, and
    ``product_share`` their share of the rate of a dense product.

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
    median: float
    ms_per_token: float
    tflop_per_s: float
    product_share: float
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
    keys and values that a token of each sequence attends to at ``length``, once. The states of
    recurrent layers are read and written.
    """
    states = 2 * RecurrentShape.of(config, sequences).nbytes
    return weight_bytes(gguf, config) + (cache.read_nbytes(length) + states) * sequences


def weight_bytes(gguf: ModelFile, config: Config) -> int:
    """Bytes of the weights that a token needs, as stored in the file."""
    total = 0.0
    for stored, values in _values_of_a_token(config):
        total += gguf.tensors[stored.name].nbytes * values / math.prod(stored.shape)
    return round(total)


def flops_of(config: Config, tokens: int, start: int = 0, outputs: int = 1) -> float:
    """Operations of ``tokens`` of one sequence from ``start`` on: two for each value of the
    matrices that a token is multiplied with, the output matrix for ``outputs`` of them alone, and
    two for each value of the keys and values that it attends to, of latent vectors those of heads.
    """
    output = config.output.matrix
    each = {
        stored: values
        for stored, values in _values_of_a_token(config)
        if isinstance(stored, StoredMatrix)
    }
    last = each.pop(output, 0.0)
    total = 2 * (tokens * sum(each.values()) + outputs * last)
    for layer in config.layers:
        if (mixer := layer.attention) is not None:
            mixer = mixer.written_out or mixer
            length = start + (tokens + 1) / 2  # on average
            keys = min(length, mixer.span or length)
            total += 2 * tokens * keys * mixer.heads * (mixer.key_dim + mixer.value_dim)
    return total


def _values_of_a_token(config: Config) -> Iterator[tuple[StoredMatrix | StoredVector, float]]:
    """Everything stored that a token needs, with the number of its values: of a mixture's experts
    as many as it uses; no tables, where it looks up a row; of a latent vector's two forms one."""
    others = {config.embedding, config.positions} - {config.output.matrix}
    if config.layer_embeddings is not None:
        others.add(config.layer_embeddings.table)
    latents = (mixer.latent for mixer in config.attentions)
    others |= {of.keys.matrix for of in latents if of is not None and of.keys is not None}
    shares = {
        stored: mixture.router.used / mixture.router.experts
        for layer in config.layers
        for mixture in layer.networks
        if isinstance(mixture, Mixture)
        for part in (mixture.gate, mixture.up, mixture.down)
        for stored in stored_in(part)
    }
    for stored in stored_in(config):
        if stored not in others:
            size = stored.rows * stored.cols if isinstance(stored, StoredMatrix) else stored.size
            yield stored, size * shares.get(stored, 1.0)


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


def bench(session: Session, gguf: ModelFile, rates: Rates, case: BenchCase) -> Iterator[BenchRow]:
    """Time ``case`` on a session with room for it.

    One untimed run of each comes first: modules are loaded and graphs recorded in it.
    """
    bench = _Bench(session, gguf, rates, case.repeats)
    for depth in case.depths:
        for prompt in filter(None, case.prompts):
            yield bench.prompt(depth, prompt)
        for generate in filter(None, case.generate):
            for count in case.sequences:
                yield bench.decode(depth, generate, count)
        for prompt, generate in case.pairs:
            yield bench.pair(depth, prompt, generate)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Rows of a session, each timed ``repeats`` times."""

    session: Session
    gguf: ModelFile
    rates: Rates
    repeats: int

    @property
    def config(self) -> Config:
        return self.session.parts.config

    def prompt(self, depth: int, prompt: int) -> BenchRow:
        flops = flops_of(self.config, prompt, depth)
        runs = self._answered(depth, prompt, 1)
        return self._row(_name(f"pp{prompt}", depth), prompt, 1, flops, runs)

    def pair(self, depth: int, prompt: int, generate: int) -> BenchRow:
        count = prompt + generate
        flops = flops_of(self.config, count, depth, generate)
        runs = self._answered(depth, prompt, generate)
        return self._row(_name(f"pp{prompt}+tg{generate}", depth), count, 1, flops, runs)

    def decode(self, depth: int, generate: int, count: int) -> BenchRow:
        before = self._tokens(depth)[:-1]
        prompts = [[*before, token] for token in self._tokens(count)]
        length, spread = len(before) + 1, _spread(count)
        end = min(length + generate + spread, self.session.context)
        steps = AT_ONCE if count <= FEW else 1
        self.session.graphs.prepare_all(count, Output.GREEDY, length, end, steps)

        def run() -> Timing:
            fill(self.session, before, count)
            return time_decoding(self.session, prompts, generate, spread)

        runs = self._timed(run)
        name = _name(f"tg{generate}" + (f" x {count}" if count > 1 else ""), depth)
        flops = flops_of(self.config, generate, depth, generate) / generate
        seconds = [timing.seconds / timing.tokens for timing in runs]
        row = self._row(name, 1, count, flops, seconds)
        busy = mean(timing.busy / timing.tokens for timing in runs)
        return self._decode_row(row, depth + generate // 2, busy)

    def _answered(self, depth: int, prompt: int, count: int) -> list[float]:
        """Seconds from a prompt after ``depth`` tokens to the last of ``count`` tokens."""
        before, tokens = self._tokens(depth), self._tokens(prompt)

        def run() -> float:
            fill(self.session, before, 1)
            return time_answer(self.session, [*before, *tokens], count).seconds

        return self._timed(run)

    def _tokens(self, count: int) -> list[int]:
        vocab = self.config.vocab_size
        return [int(t) for t in np.random.default_rng(count).integers(0, vocab, count)]

    def _timed(self, run: Callable[[], Run]) -> list[Run]:
        run()
        return [run() for _ in range(self.repeats)]

    def _row(
        self, test: str, tokens: int, sequences: int, flops: float, seconds: Sequence[float]
    ) -> BenchRow:
        rates = [tokens / s for s in seconds]
        product = flops / tokens * mean(rates)
        return BenchRow(
            test=test,
            sequences=sequences,
            tokens_per_second=mean(rates),
            deviation=stdev(rates) if len(rates) > 1 else 0.0,
            median=median(rates),
            ms_per_token=1e3 * mean(seconds) / tokens,
            tflop_per_s=product / 1e12,
            product_share=product / self.rates.product,
        )

    def _decode_row(self, row: BenchRow, length: int, busy: float) -> BenchRow:
        """``row`` with what is known of decoding only, ``length`` tokens being in the cache."""
        session, count = self.session, row.sequences
        needed = bytes_per_step(self.gguf, self.config, session.parts.cache.shape, length, count)
        shape = session.shapes.decode(count, max(length, 1), Output.GREEDY)
        plan = session.steps.bound(shape).plan
        rate = needed / count * row.tokens_per_second
        return replace(
            row,
            ms_per_step=row.ms_per_token * count,
            bytes_per_token=round(needed / count),
            moved_per_token=round(moved_per_step(plan, length, count) / count),
            gb_per_s=rate / 1e9,
            share=rate / self.rates.read,
            host_us_per_token=1e6 * busy,
        )


def _name(test: str, depth: int) -> str:
    return test + (f" @ d{depth}" if depth else "")


def _spread(sequences: int) -> int:
    """Tokens that the first of several sequences have more than the last: these begin in later
    steps, which have room for several prompts each."""
    return min(sequences - 1, 15 + sequences // 16)


def profile_step(session: Session, bandwidth: float, sequences: int = 1) -> Sequence[ProfileRow]:
    """Time each launch of a greedy step of so many sequences, each after a prompt of one, by role;
    the median of a few runs.

    Runs the step eagerly on the session, whose sequences are empty afterwards.
    """
    with EagerSteps(session) as steps, session.parts.device.create_stream() as stream:
        for sequence in range(sequences):
            steps.feed([0], sequence)
        session.parts.state.write_rows([(sequence, 0) for sequence in range(sequences)])
        bound = session.steps.bound(session.shapes.decode(sequences, 1, Output.GREEDY))
        timings = execute.profile(bound, session.parts.device, stream, repeats=_PROFILED)
    return summarise(bound.plan, timings, bandwidth, sequences)
