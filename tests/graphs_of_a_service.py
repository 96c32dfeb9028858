"""Which graphs a service records beside answers to prompts of random lengths, in simulated time.

    PYTHONPATH=.src:. python tests/graphs_of_a_service.py --rate 20 --input 20-700 --answer 20-300
    PYTHONPATH=.src:. python tests/graphs_of_a_service.py --users 64 --input 100-300 --then 400-700

Scheduler and choice of graphs are those of a service of an 8B model that was warmed up; no device
is needed. Steps take what they took on an H200 (Q4_K_M). A graph takes a thread's time to plan,
that of processes which compile its kernels, and pieces of the host's while it waits for the device.
Of each sixth of the time this prints the graphs that were recorded for what comes often, the share
of the memory for graphs that is left, and the share of padding among rows of steps with prompts.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.model.engine.requests.paper_session import PaperSession
from urdir.driver.gate import Gate
from urdir.model.engine import run_ahead
from urdir.model.engine.batch import Batch, ShapeBuckets, StepShape
from urdir.model.engine.budget import GRAPH_BYTES, MORE_GRAPH_BYTES
from urdir.model.engine.decode_graphs import DecodeGraphs
from urdir.model.engine.kept_graphs import KeptGraphs
from urdir.model.engine.requests import launcher
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.warm_up import MOST_GRAPHS, likely_shapes
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.memory.buckets import chunks_of, common_rows

CONTEXT, ALIGNMENT = 8192, 32
#: Launches of a step, kernels of a new number of rows, and bytes of device memory of each.
NODES, KERNELS, NODE_NBYTES, KERNEL_NBYTES = 262, 12, 3 << 10, 20 << 10
#: Seconds: of a plan, of processes that compile, of a piece of recording; and such pieces.
PLAN, COMPILE, PIECE, PIECES = 0.03, 1.5, 0.00024, 33
#: Seconds of the host for a launch, and of a look at what others do.
LAUNCH, LOOK = 0.0003, 0.00002


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


class SimulatedSteps:
    """Graphs that take time to be made. ``on_the_way``: those that a step had to wait for."""

    observer = None

    def __init__(self, clock: Clock, most_bytes: int) -> None:
        self._clock = clock
        self._graphs = KeptGraphs[StepShape](most_bytes)
        self._rows: set[int] = set()  # whose kernels are loaded
        self._begun: dict[StepShape, tuple[float, int]] = {}  # when its kernels are there; pieces
        self._helper = 0.0  # when it has planned what it has to
        self.gate = Gate(clock=lambda: clock.now)
        self.recorded, self.on_the_way, self.forgotten = 0, 0, 0

    @property
    def graph_bytes(self) -> int:
        return self._graphs.nbytes + KERNEL_NBYTES * KERNELS * len(self._rows)

    @property
    def free_share(self) -> float:
        return 1 - self.graph_bytes / self._graphs.most_bytes

    def is_recorded(self, shape: StepShape) -> bool:
        return shape in self._graphs

    @property
    def is_waiting(self) -> bool:
        return any(self._clock.now < at for at, _ in self._begun.values())

    def waits(self, shape: StepShape) -> bool:
        return shape in self._begun and self._clock.now < self._begun[shape][0]

    def prepare(self, shape: StepShape) -> bool:
        if shape in self._graphs:
            return False
        self._clock.now += LOOK
        if shape not in self._begun:
            self._helper = max(self._helper, self._clock.now) + PLAN
            compiled = 0.0 if shape.rows in self._rows else COMPILE
            self._begun[shape] = self._helper + compiled, PIECES * shape.steps
        elif not self.waits(shape):
            at, left = self._begun[shape]
            self._begun[shape] = at, left - 1
            self._clock.now += PIECE
            if left == 1:
                self.keep(shape)
                self.recorded += 1
                return False
        return True

    def keep(self, shape: StepShape) -> None:
        self._begun.pop(shape, None)
        self._rows.add(shape.rows)
        nbytes = NODES * NODE_NBYTES * shape.steps
        graph: Any = SimpleNamespace(nbytes=nbytes, close=lambda: None)
        self._graphs.keep(shape, graph, self.graph_bytes - self._graphs.nbytes)

    def forget(self, shape: StepShape) -> None:
        self._graphs.forget(shape)
        self.forgotten += 1

    def launch(self, shape: StepShape) -> None:
        if self._graphs.use(shape) is None:
            self.on_the_way += 1
            self._clock.now += PLAN + COMPILE / KERNELS + PIECE * PIECES * shape.steps
            self.keep(shape)

    def wait_for_helper(self) -> None: ...

    def end_compilers(self) -> None: ...


class SimulatedSession(PaperSession):
    """Steps follow each other on a device that takes time."""

    def __init__(self, shapes: ShapeBuckets, sequences: int, clock: Clock, most: int) -> None:
        super().__init__(shapes, CONTEXT, sequences)
        self._clock = clock
        self.steps = SimulatedSteps(clock, most)
        self.graphs = DecodeGraphs(self.steps, shapes)
        self.storage.room = 1 << 40
        self.end = 0.0  # of the last step
        self.rows = self.padding = 0  # of steps with prompts
        self.stream.record = lambda event: setattr(event, "end", self.end)
        self.parts.device.create_event = lambda name: SimulatedEvent(clock)

    def launch(self, shape: StepShape, batch: Batch, *rows: Any, **more: Any) -> None:
        super().launch(shape, batch, *rows, **more)
        self.steps.launch(shape)
        self._clock.now += LAUNCH
        seconds = shape.steps * (0.0013 + 24e-6 * shape.rows)
        if shape.prompt:
            seconds = 0.0019 + 19.5e-6 * shape.rows
            used = len(batch.decode) + sum(of.end - of.start for of in batch.segments)
            self.rows += shape.rows
            self.padding += shape.rows - used
        self.end = max(self.end, self._clock.now) + seconds


class SimulatedEvent:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.end = clock, 0.0

    @property
    def is_done(self) -> bool:
        return self._clock.now >= self.end

    def synchronize(self) -> None:
        self._clock.now = max(self._clock.now, self.end)

    def close(self) -> None: ...


def warmed_up(sequences: int, clock: Clock) -> SimulatedSession:
    shapes = ShapeBuckets.of(chunks_of(exact=False), CONTEXT, sequences, ALIGNMENT)
    shapes = replace(shapes, one_length=True)
    most = GRAPH_BYTES + MORE_GRAPH_BYTES * (len(common_rows(sequences)) - 1)
    session = SimulatedSession(shapes, sequences, clock, most)
    for shape in islice(dict.fromkeys(likely_shapes(shapes)), MOST_GRAPHS):
        session.steps.keep(shape)
    return session


class Load:
    """Requests at random times, ``rate`` a second, or of ``users`` who ask one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._random = np.random.default_rng(args.seed)
        self._args = args
        pauses = self._random.exponential(1 / args.rate, int(2 * args.rate * args.seconds) + 1)
        times = [0.0] * args.users if args.users else np.cumsum(pauses).tolist()
        self._times = times
        self._open: dict[Answer, float] = {}
        self.firsts: list[float] = []
        self.tokens = 0

    @property
    def next(self) -> float:
        return self._times[0]

    def ask(self, loop: AnswerLoop, now: float) -> None:
        while self._times and self._times[0] <= now:
            lengths = self._args.input if now < self._args.seconds / 2 else self._args.then
            count, limit = (int(self._random.integers(*of)) for of in (lengths, self._args.answer))
            request = Request(prompt=(1,) * count, settings=GREEDY, limit=limit, ignore_end=True)
            answer = loop.answer_to(request)
            self._open[answer] = heapq.heappop(self._times)
            loop.add(answer)

    def read(self, loop: AnswerLoop, now: float) -> None:
        for answer, items in loop.take_items().items():
            for item in items:
                if isinstance(item, Piece):
                    self.tokens += len(item.choices)
                    if (asked := self._open.pop(answer, None)) is not None:
                        self.firsts.append(now - asked)
                elif isinstance(item, Ending) and self._args.users:
                    heapq.heappush(self._times, now)


def simulate(args: argparse.Namespace) -> None:
    clock = Clock()
    for module in (run_ahead, launcher):
        module.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[attr-defined]
    session, load = warmed_up(args.sequences, clock), Load(args)
    steps, told = session.steps, 0
    print(f"of {steps._graphs.most_bytes >> 20} MB {steps.free_share:.0%} are left")
    limits = Limits.for_latency(session.shapes)
    if args.at_once:
        limits = Limits.for_throughput(session.shapes, args.users)
    with AnswerLoop(session, None, limits) as loop:  # type: ignore[arg-type]
        while clock.now < args.seconds:
            load.ask(loop, clock.now)
            if loop.is_idle:
                clock.now = load.next
                continue
            loop.turn()
            load.read(loop, clock.now)
            if clock.now >= (told + 1) * args.seconds / 6:
                told += 1
                first = np.percentile(load.firsts, (50, 99)) * 1e3
                print(
                    f"{clock.now:.0f} s: {steps.recorded} recorded, {steps.forgotten} forgotten, "
                    f"{steps.on_the_way} on the way, {steps.free_share:.0%} left; "
                    f"padding {session.padding / session.rows:.1%}; "
                    f"{load.tokens / clock.now:,.0f} tokens/s, "
                    f"first token {first[0]:.1f} / {first[1]:.1f} ms"
                )
                session.padding = session.rows = 0


def lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low) + 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--at-once", action="store_true", help="prompts take all rows of a step")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--input", type=lengths, default=(20, 701))
    parser.add_argument("--then", type=lengths, help="of the second half of the time")
    parser.add_argument("--answer", type=lengths, default=(20, 301))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.then = args.then or args.input
    simulate(args)


if __name__ == "__main__":
    main()
