"""Many requests to whatever answers them: throughput and latency.

Prompts are random token ids, so that nothing but ``shared`` tokens is found in a cache of prefixes;
answers go on past the end token to their length. Requests arrive at random times (a Poisson process
of ``rate`` a second), however many are open, or ``users`` ask one after another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from urdir.model.errors import ModelError
from urdir.model.measure.plot import check_can_plot, save

#: The longest of lengths around a mean, in deviations above it.
_FARTHEST = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from ``low`` to ``high``, drawn evenly, or around a mean by a gamma
    distribution, as texts of real users are: a few are much longer."""

    low: int
    high: int
    mean_deviation: tuple[int, int] | None = None

    @classmethod
    def around(cls, mean: int, deviation: int) -> Lengths:
        """Lengths of that mean and deviation."""
        return cls(1, mean + _FARTHEST * deviation, (mean, deviation))

    def draw(self, random: np.random.Generator) -> int:
        """One of them."""
        if self.mean_deviation is None:
            return int(random.integers(self.low, self.high, endpoint=True))
        mean, deviation = self.mean_deviation
        length = random.gamma((mean / deviation) ** 2, deviation**2 / mean)
        return min(max(round(length), self.low), self.high)

    def __str__(self) -> str:
        if self.mean_deviation is not None:
            return "{}~{}".format(*self.mean_deviation)
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class LoadCase:
    """``requests`` in all, whose prompts and answers have lengths of two distributions.

    The first ``shared`` tokens of all prompts are the same. Either ``rate`` is given, in requests a
    second, or there are ``users``.
    """

    requests: int = 100
    inputs: Lengths = Lengths(512, 512)
    outputs: Lengths = Lengths(128, 128)
    shared: int = 0
    rate: float | None = None
    users: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to come, ``at`` seconds after the start."""

    at: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Reply:
    """What came of a request; times in seconds of one clock."""

    start: float
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of its text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    _last: float = 0.0

    def add(self, count: int) -> None:
        """Note that ``count`` pieces have come, together."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        else:
            self.gaps += [(now - self._last) / count] * count
        self._last = now


@dataclass(frozen=True, slots=True)
class Throughput:
    """All requests together."""

    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    cached_share: float  # of the prompts' tokens


@dataclass(frozen=True, slots=True)
class Latency:
    """A time in milliseconds, over requests or tokens; None without any."""

    name: str
    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    most: float | None


def plan_load(case: LoadCase, vocabulary: int) -> list[Ask]:
    """The requests of ``case``, in the order in which they arrive."""
    random = np.random.default_rng(case.seed)
    shared = tuple(random.integers(vocabulary, size=case.shared).tolist())
    pauses = random.exponential(1 / case.rate if case.rate else 0.0, case.requests)
    asks = []
    for at in np.cumsum(pauses):
        length = case.inputs.draw(random)
        own = random.integers(vocabulary, size=max(length - case.shared, 0)).tolist()
        tokens = case.outputs.draw(random)
        asks.append(Ask(float(at), (*shared, *own)[:length], tokens))
    return asks


async def run_load(
    send: Callable[[Ask], Awaitable[Reply]],
    case: LoadCase,
    asks: Sequence[Ask],
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> list[Reply]:
    """Send all requests; their replies in the order in which they ended."""
    replies: list[Reply] = []

    async def one(ask: Ask) -> None:
        replies.append(await send(ask))
        on_reply(replies[-1])

    if case.rate is not None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await asyncio.sleep(start + ask.at - time.perf_counter())
                group.create_task(one(ask))
        return replies

    async def user(left: Iterator[Ask]) -> None:
        for ask in left:
            await one(ask)

    left = iter(asks)
    await asyncio.gather(*(user(left) for _ in range(case.users)))
    return replies


def summarise(replies: Sequence[Reply]) -> tuple[Throughput, list[Latency]]:
    """What the replies say; those that failed count as such alone. ModelError if all did."""
    good = [reply for reply in replies if reply.error is None]
    if not good:
        raise ModelError(f"all {len(replies)} requests failed: {replies[0].error}")
    seconds = max(r.end for r in good) - min(r.start for r in good)
    prompts = sum(r.prompt_tokens for r in good)
    throughput = Throughput(
        requests=len(replies),
        failed=len(replies) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        input_tokens_per_second=prompts / seconds,
        output_tokens_per_second=sum(r.tokens for r in good) / seconds,
        cached_share=sum(r.cached_tokens for r in good) / max(prompts, 1),
    )
    return throughput, [
        _latency("first token", (r.first - r.start for r in good if r.first is not None)),
        _latency("between tokens", (gap for r in good for gap in r.gaps)),
        _latency(
            "a token after the first",
            ((r.end - r.first) / (r.tokens - 1) for r in good if r.first and r.tokens > 1),
        ),
        _latency("whole answer", (r.end - r.start for r in good)),
    ]


def _latency(name: str, seconds: Iterable[float]) -> Latency:
    times = np.array([*seconds]) * 1e3
    if not len(times):
        return Latency(name, 0, None, None, None, None, None)
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return Latency(name, len(times), float(times.mean()), p50, p90, p99, float(times.max()))


def plot_load(replies: Sequence[Reply], title: str, path: Path) -> None:
    """Draw the shares of first tokens and of pauses that took no longer than a time.

    The format follows the suffix of ``path``. Raises ModelError without matplotlib, or when the
    file cannot be written.
    """
    check_can_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    good = [reply for reply in replies if reply.error is None]
    firsts = [reply.first - reply.start for reply in good if reply.first is not None]
    for label, seconds in (
        ("first token", firsts),
        ("between tokens", [gap for reply in good for gap in reply.gaps]),
    ):
        times = np.sort(seconds) * 1e3
        axes.step(times, np.arange(1, len(times) + 1) / max(len(times), 1), label=label)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
