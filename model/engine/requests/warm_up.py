"""Graphs of likely steps, recorded before a request needs them.

The first step of a shape is recorded when it is needed, which delays all users: by 100 ms with an
8B model, by 300 ms if kernels have to be compiled (H200). So a service records likely graphs in
short pieces while it would wait, for requests or for the device; a new request waits for at most
one piece. Those of one user's first request are recorded before a service is ready.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from urdir.driver.errors import DriverError
from urdir.driver.module import Tell
from urdir.model.engine.batch import Batch, Output, Segment, ShapeBuckets, StepShape
from urdir.model.engine.requests.limits import SOME_ROWS
from urdir.model.engine.run_ahead import AT_ONCE, FEW
from urdir.model.engine.runner import Steps
from urdir.model.memory.buckets import COARSE_CHUNKS, COARSE_ROWS, MOST_DRAFTED, common_rows

log = logging.getLogger("urdir.engine")

#: Graphs that are recorded beforehand, at most.
MOST_GRAPHS = 192
#: The share of the memory for graphs that is left to shapes that requests need.
_LEFT = 1 / 4
#: Graphs that are begun and not recorded, at most: kernels of all these are compiled side by side.
_AHEAD = 96
#: Rows of the prompts whose graphs a first request may need.
_FIRST_CHUNKS = (64, 128, 256)
#: Seconds between looks at what other threads and processes do.
_LOOK = 0.001


def collect_no_graphs(steps: Steps) -> None:
    """Exclude what lives now from garbage collection (`gc.freeze`), and the objects of plans and
    graphs of ``steps`` when they are made: the collector stops all threads while it scans them.
    Half a million, of the graphs of a service, took 0.27 s on a core of a cloud Xeon; the 80,000 of
    a program with an 8B model and few graphs take 28 ms, as long as nine steps of 80 rows. None of
    them is in a cycle; garbage of that moment would stay, so it is done twice for each of
    `MOST_GRAPHS` graphs at most, and what is garbage before is collected first. Nothing is done on
    the emulator, whose steps take longer than a collection.
    """
    if steps.parts.device.is_emulated:
        return
    times = iter(range(2 * MOST_GRAPHS))

    def freeze() -> None:
        if next(times, None) is not None:
            gc.freeze()

    gc.unfreeze()  # of a model before
    gc.collect()
    gc.freeze()
    steps.on_graph = steps.on_plan = freeze


class WarmUp:
    """Records graphs of ``steps`` for the first ``shapes`` in their order. A service is not
    ready before those of the ``needed`` shapes are recorded.

    It ends when three quarters of the memory for graphs are full, or when one cannot be made: the
    step that needs it tries again, and its requests end with the error.
    """

    def __init__(
        self,
        steps: Steps,
        shapes: Iterable[StepShape],
        needed: Iterable[StepShape] = (),
    ) -> None:
        self._steps = steps
        self._needed = dict.fromkeys(needed)
        self._shapes = deque(islice(dict.fromkeys(chain(self._needed, shapes)), MOST_GRAPHS))
        # whose kernels are not asked for: most of them depend on the number of rows
        new_rows = {shape.rows: shape for shape in reversed(self._shapes)}.values()
        self._new = dict.fromkeys((*reversed(new_rows), *self._shapes))
        self._begun = time.monotonic()
        #: Called when all is recorded, or no more will be.
        self.on_end: Callable[[], None] = lambda: None
        #: Graphs that are recorded.
        self.recorded = 0

    @property
    def left(self) -> int:
        """The number of graphs still to record."""
        return len(self._shapes)

    def run(self, seconds: float, tell: Tell = lambda done, total: None) -> None:
        """Record the needed graphs, and others until ``seconds`` are over; ``tell`` receives
        recorded and total counts. Nothing runs: weights need not be loaded yet."""
        end = time.monotonic() + seconds
        while self.left and (self._needed or time.monotonic() < end):
            if not self.work(_LOOK):
                time.sleep(_LOOK)
            tell(self.recorded, self.recorded + self.left)

    def work(self, seconds: float) -> bool:
        """Record in small pieces for ``seconds``; False where all that have begun wait for other
        threads, or something else is in a hurry (`Steps.gate`)."""
        end, gate = time.monotonic() + seconds, self._steps.gate
        while not gate.left and (shape := self._next) is not None:
            while self._do(shape) and not self._steps.waits(shape):
                if time.monotonic() >= end:
                    return True
                if gate.left:
                    return False
        return False

    @property
    def _next(self) -> StepShape | None:
        """The first graph that waits for no other thread, of those that may have begun: others
        than the needed ones once all kernels of these are asked for, which are compiled first.
        While processes that compile may soon have nothing to do, one whose kernels are not asked
        for comes before those that may be recorded, except the needed ones: first one of each
        number of rows."""
        steps, first = self._steps, list[Iterable[StepShape]]([self._needed])
        if self._new.keys().isdisjoint(self._needed):
            if steps.parts.device.wants_kernels:
                begun = len(self._shapes) - len(self._new)
                first.append(islice(self._new, max(0, _AHEAD - begun)))
            first.append(islice(self._shapes, _AHEAD))
        ready = (shape for shape in chain(*first) if not steps.waits(shape))
        return next(filter(steps.has_begun, ready) if steps.plans_enough else ready, None)

    def _do(self, shape: StepShape) -> bool:
        """Do a piece of a graph; whether more of it is left."""
        try:
            if self._steps.free_share <= _LEFT:
                self._shapes.clear()
            elif self._steps.prepare(shape):
                if shape in self._new and self._steps.has_asked(shape):
                    del self._new[shape]
                return True
            else:
                self._shapes.remove(shape)
                self._needed.pop(shape, None)
                self._new.pop(shape, None)
                self.recorded += 1
        except DriverError:
            self._shapes.clear()
        except Exception:
            log.exception("no more steps are recorded ahead")
            self._shapes.clear()
        if not self._shapes:
            self.on_end()
            self._steps.end_compilers()
            seconds = time.monotonic() - self._begun
            log.info("%d graphs recorded after %.1f s", self.recorded, seconds)
        return False


def first_shapes(
    shapes: ShapeBuckets, output: Output = Output.SAMPLE, divided: bool = False
) -> Iterator[StepShape]:
    """Shapes of one user's first request: a short prompt and its answer. Until others are recorded,
    shorter prompts are padded to these."""
    yield from _answering(shapes, 1, shapes.lengths[0], output, ())
    for shape in _asking(shapes, shapes.lengths[0], output, divided):
        if shape.rows in _FIRST_CHUNKS or shape.rows == shapes.chunks[-1]:
            yield shape


def likely_shapes(
    shapes: ShapeBuckets,
    outputs: Sequence[Output] = (Output.SAMPLE, Output.GREEDY),
    mixed_rows: int = SOME_ROWS,
    divided: bool = False,
    most: tuple[int, int] | None = None,
) -> Iterator[StepShape]:
    """Shapes of the steps of a service, the likeliest first, some of them again and again.

    In every round sequences are longer, and there are more of them, than in the one before. Of the
    ``outputs`` all of the first come first: OpenAI's clients sample by default, and steps that
    sample serve greedy answers as well. Of the others steps of answers alone have shapes here, as
    in those that have prompts the choice of a token takes no time to speak of.
    Beside answers a step takes up to ``mixed_rows`` rows of prompts. These may be ``divided``: then
    their parts are of any length, not of as many rows as a step takes. There are at ``most`` so
    many users with this many tokens each.
    """
    new_rows = [rows for rows in COARSE_CHUNKS if rows <= min(mixed_rows, shapes.chunks[-1])]
    most_users, longest = most or (shapes.rows, shapes.lengths[-1])
    users = common_rows(min(most_users, shapes.rows))
    enough = bisect_left(shapes.lengths, min(longest, shapes.lengths[-1]))
    lengths = shapes.lengths[: enough + 1]
    for output in outputs:
        is_first = output is outputs[0]
        for reach in range(max(len(lengths), len(users))):
            near, few = lengths[: reach + 1], users[: 2 * reach + 1]
            for length in near:
                for count in few:
                    beside = new_rows if is_first else ()
                    yield from _answering(shapes, count, length, output, beside)
                if not is_first:
                    continue
                yield from _asking(shapes, length, output, divided)
                yield from _asking_together(shapes, length, output) if reach else ()
            yield from _asking_long(shapes, near[-1]) if is_first else ()


def _answering(
    shapes: ShapeBuckets, users: int, length: int, output: Output, new_rows: Sequence[int]
) -> Iterator[StepShape]:
    """Shapes of answers that continue, the longest to ``length`` tokens: alone, and with a new
    prompt of each number of rows in ``new_rows``, rounded up with the number of users."""
    yield shapes.decode(users, length, output)
    if users <= FEW:
        yield shapes.decode(users, length, output, AT_ONCE)
        yield from _drafted(shapes, users, length, output)
    for rows in new_rows if users < shapes.rows else ():
        for end in _ends(shapes, rows, length):
            asking = Segment(users, end - rows, end, chooses=True)
            yield shapes.of_batch(Batch(tuple(range(users)), (asking,)), length, output)


def _drafted(shapes: ShapeBuckets, users: int, length: int, output: Output) -> Iterator[StepShape]:
    """Shapes of a few answers that continue with drafts."""
    most = min(users * (1 + shapes.drafts), MOST_DRAFTED)
    for rows in (rows for rows in common_rows(most) if rows > users):
        for steps in (1, AT_ONCE):
            yield shapes.decode(rows, length, output, steps, drafted=True)


def _asking(
    shapes: ShapeBuckets, length: int, output: Output, divided: bool
) -> Iterator[StepShape]:
    """Shapes of single prompts up to a length: their ends, and earlier chunks of long or divided
    ones. They start a sequence or continue one."""
    for start in (0, 1):
        for rows in shapes.chunks:
            if start + rows <= length:
                end = Segment(0, start, start + rows, chooses=True)
                yield shapes.of_batch(Batch((), (end,)), length, output)
        for rows in shapes.chunks if divided else shapes.first_chunks:
            if start + rows <= length:
                before = Segment(0, start, start + rows)
                yield shapes.of_batch(Batch((), (before,)), length, Output.NONE)


def _asking_long(shapes: ShapeBuckets, longest: int) -> Iterator[StepShape]:
    """Shapes of long prompts: their first steps, which no running step leaves time to prepare, and
    those that expand cached latents up to ``longest``."""
    rows = shapes.chunks[-1]
    for end in (rows, 2 * rows, *_ends(shapes, rows, longest)):
        length = min(end, shapes.lengths[-1])
        before = Segment(0, max(0, length - rows), length)
        yield shapes.of_batch(Batch((), (before,)), length, Output.NONE)


def _asking_together(shapes: ShapeBuckets, length: int, output: Output) -> Iterator[StepShape]:
    """Shapes of simultaneous prompts up to a length: two, or many of which one is long."""
    for rows in COARSE_CHUNKS:
        for count in (2, *(fewer + 1 for fewer in COARSE_ROWS[1:])):
            first = rows - (count - 1) * shapes.alignment
            if first > 0 and rows <= shapes.chunks[-1] and count <= shapes.rows:
                short = [Segment(s, 0, shapes.alignment, chooses=True) for s in range(1, count)]
                for end in _ends(shapes, first, length):
                    prompts = (Segment(0, end - first, end, chooses=True), *short)
                    yield shapes.of_batch(Batch((), prompts), length, output)


def _ends(shapes: ShapeBuckets, rows: int, longest: int) -> Iterator[int]:
    """Ends of a segment of ``rows`` rows, up to ``longest``, that cover all shapes of its step.
    Short segments instead of it may expand twice as many tokens."""
    yield rows
    if shapes.walk is not None:
        yield from (end for end in shapes.walk.ends(max(longest, 2 * rows)) if end > rows)
