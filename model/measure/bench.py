"""Speed of a model on a device: prompts, decoding, several sequences at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, TypeVar

from urdir.driver import execute
from urdir.driver.errors import DriverError, loses_device
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.run_ahead import AT_ONCE, FEW
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError
from urdir.model.measure.costs import bytes_per_step, flops_of, moved_per_step
from urdir.model.measure.timed_answers import (
    Timing,
    drawn_tokens,
    fill,
    record_prompt,
    time_answer,
    time_decoding,
    usual_spread,
)
from urdir.model.memory.buckets import row_buckets

if TYPE_CHECKING:
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_settings import DraftSettings

log = logging.getLogger("urdir.bench")
Run = TypeVar("Run")
#: Runs of a step that is profiled.
PROFILED = 6
#: Untimed runs at most: another one follows while each leaves graphs to be made.
_MOST_UNTIMED = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best: bytes ``read`` per second, and operations per second of a dense
    f16 ``product``."""

    read: float
    product: float


@dataclass(frozen=True, slots=True)
class BenchTest:
    """After ``depth`` tokens of context, ``prompt`` tokens of one sequence, or ``generate`` tokens
    of each of some ``sequences``, or both; with ``drafts`` where they are given."""

    depth: int
    prompt: int = 0
    generate: int = 0
    sequences: int = 1
    drafts: DraftSettings | None = None

    @property
    def name(self) -> str:
        """As llama-bench has it, and the number of sequences, and the drafts."""
        parts = {f"pp{self.prompt}": self.prompt, f"tg{self.generate}": self.generate}
        test = "+".join(part for part, tokens in parts.items() if tokens)
        test += f" x {self.sequences}" if self.sequences > 1 else ""
        test += f" @ d{self.depth}" if self.depth else ""
        if self.drafts is None or not self.generate:
            return test
        of, spec = self.drafts, f", {self.drafts.kind} {self.drafts.least}-{self.drafts.most}"
        return test + spec + (f" accept {of.chance:g}" if of.chance is not None else "")


@dataclass(frozen=True, slots=True)
class BenchCase:
    """What to time, each ``repeats`` times after each of the ``depths``, tokens of context: each
    number of ``prompts``, tokens fed; each number of ``generate``, steps decoded greedily by each
    number of ``sequences``; each of ``pairs``, a prompt and steps after it. Where steps verify
    ``drafts``, this many tokens are decoded.
    """

    prompts: tuple[int, ...] = (512,)
    generate: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    repeats: int = 5
    sequences: tuple[int, ...] = (1,)
    pairs: tuple[tuple[int, int], ...] = ()
    drafts: DraftSettings | None = None

    @property
    def context(self) -> int:
        """Tokens of context that each sequence needs."""
        prompts = (*self.prompts, *(p + n for p, n in self.pairs), 2)
        depth, most = max(self.depths, default=0), max(prompts)
        if self.sequences:
            # a token before the first step, at least
            spread = _spread(self.most_sequences, self.drafts) + (depth == 0)
            generated = max((n + spread for n in self.generate if n), default=0)
            most = max(most, generated)
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
        return [part for part in parts if part.tests or part.sequences]

    @property
    def tests(self) -> list[BenchTest]:
        """What is timed, a row each."""
        tests = []
        for depth in self.depths:
            tests += [BenchTest(depth, prompt) for prompt in filter(None, self.prompts)]
            tests += [
                BenchTest(depth, generate=generate, sequences=count, drafts=self.drafts)
                for generate in filter(None, self.generate)
                for count in self.sequences
            ]
            tests += [
                BenchTest(depth, prompt, generate, drafts=self.drafts)
                for prompt, generate in self.pairs
            ]
        return tests


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

    The rest is for decoding only (None for prompts, and where steps verify drafts: several tokens
    share one reading of the weights).
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


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A case that could not be measured, in place of its `BenchRow`, and why."""

    test: str
    sequences: int
    error: str

    @classmethod
    def of(cls, test: BenchTest, error: Exception) -> FailedRow:
        """The row of a test that ended with an error; one that is a mistake of ours is logged."""
        message = " ".join(str(error).split())
        if not isinstance(error, DriverError | ModelError):
            message = f"{type(error).__name__}: {message}"
            log.error("%s failed", test.name, exc_info=error)
        return cls(test.name, test.sequences, message)


def bench(
    session: Session, gguf: ModelFile, rates: Rates, case: BenchCase
) -> Iterator[BenchRow | FailedRow]:
    """Time ``case`` on a session with room for it. Raises DriverError, after the row of the test
    that met it, where the device is lost.

    Untimed runs of each come first, until one leaves no graph to be made: modules are loaded and
    graphs recorded in them, also those that a service records beside its steps.
    """
    bench = _Bench(session, gguf, rates, case.repeats)
    for test in case.tests:
        row: BenchRow | FailedRow
        failure: Exception | None = None
        try:
            row = bench.row(test)
        except Exception as error:
            row, failure = FailedRow.of(test, error), error
        yield row
        if failure is not None and loses_device(failure):
            raise failure


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

    def row(self, test: BenchTest) -> BenchRow:
        """Time one test."""
        return self._answered(test) if test.prompt else self._decoded(test)

    def _answered(self, test: BenchTest) -> BenchRow:
        """A prompt and what follows it, a token at least."""
        before, tokens = (drawn_tokens(self.session, n) for n in (test.depth, test.prompt))
        chosen, count = max(1, test.generate), test.prompt + test.generate
        record_prompt(self.session, test.depth, test.depth + test.prompt)

        def run() -> float:
            fill(self.session, before, 1)
            return time_answer(self.session, [*before, *tokens], chosen).seconds

        flops = flops_of(self.config, count, test.depth, chosen)
        return self._row(test, count, flops, self._timed(run))

    def _decoded(self, test: BenchTest) -> BenchRow:
        depth, generate, count = test.depth, test.generate, test.sequences
        before = drawn_tokens(self.session, depth)[:-1]
        prompts = [[*before, token] for token in drawn_tokens(self.session, count)]
        length, spread = len(before) + 1, _spread(count, test.drafts)
        end = min(length + generate + spread, self.session.context)
        steps, graphs = AT_ONCE if count <= FEW else 1, self.session.graphs
        paced = self.session.paced
        for rows in (count, 0 if paced is None else paced.fewer(count)):
            if rows:
                graphs.prepare_all(rows, Output.GREEDY, length, end, steps)
        if test.drafts is not None:
            most = min(count * (1 + test.drafts.most), self.session.parts.state.rows)
            for rows in (rows for rows in row_buckets(most) if rows > count):
                graphs.prepare_all(rows, Output.GREEDY, length, end, steps, drafted=True)

        def run() -> Timing:
            fill(self.session, before, count)
            return time_decoding(self.session, prompts, generate, spread)

        runs = self._timed(run)
        flops = flops_of(self.config, generate, depth, generate) / generate
        row = self._row(test, 1, flops, [timing.seconds / timing.tokens for timing in runs])
        if test.drafts is not None:
            return row
        busy = mean(timing.busy / timing.tokens for timing in runs)
        return self._decode_row(row, depth + generate // 2, busy)

    def _timed(self, run: Callable[[], Run]) -> list[Run]:
        for _ in range(_MOST_UNTIMED):
            run()  # which may compile
            if self.session.parts.device.is_emulated or not self.session.steps.finish():
                break
        return [run() for _ in range(self.repeats)]

    def _row(
        self, test: BenchTest, tokens: int, flops: float, seconds: Sequence[float]
    ) -> BenchRow:
        rates = [tokens / s for s in seconds]
        product = flops / tokens * mean(rates)
        return BenchRow(
            test=test.name,
            sequences=test.sequences,
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
        needed = bytes_per_step(self.gguf, self.config, session.cache.shape, length, count)
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


def _spread(sequences: int, drafts: DraftSettings | None) -> int:
    """`usual_spread`, or that of steps with drafts, which take several tokens of some sequences."""
    steps = usual_spread(sequences)
    return steps if drafts is None else (1 + drafts.most) * (steps + 1)


def time_step(session: Session, sequences: int = 1) -> tuple[Plan, Sequence[execute.Timing]]:
    """The plan of a greedy step of this many sequences, each after a prompt of one token, and the
    time of each launch: the median of a few runs.

    Runs the step eagerly on the session, whose sequences are empty afterwards.
    """
    with EagerSteps(session) as steps, session.parts.device.create_stream() as stream:
        for sequence in range(sequences):
            steps.feed([0], sequence)
        session.parts.state.write_rows([(sequence, 0) for sequence in range(sequences)])
        bound = session.steps.bound(session.shapes.decode(sequences, 1, Output.GREEDY))
        return bound.plan, execute.profile(bound, session.parts.device, stream, repeats=PROFILED)
