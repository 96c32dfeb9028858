"""Steps that are expected after those queued: their graphs are prepared while the host waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.decode_graphs import LOOK_AHEAD
from urdir.model.engine.requests.recorded_shapes import RecordedShapes
from urdir.model.engine.requests.scheduler import Scheduler
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.engine.run_ahead import AT_ONCE, FEW
from urdir.model.memory.buckets import common_rows

if TYPE_CHECKING:
    from urdir.model.engine.session import Session

log = logging.getLogger("urdir.engine")

#: Tokens between two searches for the graphs that an answer needs: fewer than the look-ahead.
_STRIDE = LOOK_AHEAD // 4


class ExpectedSteps:
    """What follows the last step of ``scheduler``, by ``shapes`` of ``session``."""

    def __init__(self, session: Session, scheduler: Scheduler, shapes: RecordedShapes) -> None:
        self._session = session
        self._scheduler = scheduler
        self._shapes = shapes
        self._pieces: Sequence[Callable[[], bool]] = ()  # each prepares a bit; False: all is done
        self._expected: tuple[object, ...] | None = None
        self._next: StepShape | None = None  # the step after the first token of an answer alone
        self._last: tuple[int, Output] | None = None  # length and output of the last step

    @property
    def takes_time(self) -> bool:
        """Whether the next step is that of an answer alone, and has no graph yet."""
        return self._next is not None and not self._session.steps.is_recorded(self._next)

    def expect(self, last: StepPlan, shape: StepShape, output: Output) -> None:
        """Note which steps will follow, if what chooses a token in the last one goes on: by
        ``output``, with drafts, or as by ``shape``."""
        choosers = len(last.choosers)
        self._next = None
        if not choosers:
            return
        rows, drafted = choosers + sum(last.batch.drafts), shape.drafts > 0
        drafting, paced = self._scheduler.drafting, self._scheduler.paced
        wished = 0 if drafting is None else drafting.wished
        fewer = 0 if paced is None else paced.wished
        end, longest = self._scheduler.end(last), last.longest
        if longest < end and not last.requests and not self._scheduler.queued:
            self._next = self._shapes.following(rows, longest + 1, output)
        self._last = longest, output
        outputs = shape.output, output
        wishes = wished, fewer, self._shapes.wished
        expected = (rows, outputs, longest // _STRIDE, end, drafted, wishes)
        if expected != self._expected:
            self._expected = expected
            steps = AT_ONCE if choosers <= FEW and output.is_token else 1
            prepare = self._session.graphs.prepare
            ahead = rows if drafted or rows <= FEW else self._common(rows)
            pieces: list[Callable[[], bool]] = [
                partial(prepare, ahead, shape.output, longest, end, steps, drafted),
                *self._catching_up(longest, end),
            ]
            if wished > rows:
                pieces.append(partial(prepare, wished, output, longest, end, steps, True))
            if drafted:
                pieces.append(partial(prepare, choosers, shape.output, longest, end, steps))
            if fewer:
                pieces.append(partial(prepare, fewer, output, longest, end, steps))
            pieces.append(self._shapes.prepare)
            self._pieces = pieces

    def forget(self) -> None:
        """Expect nothing: the last step was launched in halves."""
        self._next = self._expected = None
        self._pieces = ()

    def prepare(self) -> bool:
        """Do a small piece of preparing for what is expected; False where all is done, or where
        another thread does some of it: then a piece of each of the others, too."""
        with in_advance():
            is_left = False
            for piece in self._pieces:
                is_left |= piece()
                if is_left and not self._session.steps.is_waiting:
                    return True
            if is_left:
                return False
        self._pieces = ()
        return False

    def is_ready(self, rows: int, *, drafted: bool = False) -> bool:
        """Whether a step of this many rows, with drafts or without, takes no preparation now."""
        steps = self._session.steps
        if steps.observer is not None:
            return True
        if self._last is None:
            return False
        longest, output = self._last
        shapes = self._session.shapes
        length = min(longest + 1 + (shapes.drafts if drafted else 0), shapes.lengths[-1])
        return steps.is_recorded(shapes.decode(rows, length, output, drafted=drafted))

    def _common(self, rows: int) -> int:
        """The next number of rows whose graphs serve others, too. Theirs are recorded where steps
        would spare many rows (`RecordedShapes`)."""
        return next(count for count in common_rows(self._session.sequences) if count >= rows)

    def _catching_up(self, longest: int, end: int) -> list[Callable[[], bool]]:
        """What prepares the steps that pass missed tokens through a draft model that rests."""
        drafting = self._scheduler.drafting
        if drafting is None or drafting.rest is None:
            return []
        lengths = (longest, min(longest + LOOK_AHEAD, end))
        shapes = dict.fromkeys(self._session.shapes.catch_up(at - 1, at)[0] for at in lengths)
        return [partial(self._session.steps.prepare, shape) for shape in shapes]


@contextmanager
def in_advance() -> Iterator[None]:
    """Do something before it is needed, which may fail: the step that needs it tries again, and its
    requests end by the error."""
    try:
        yield
    except DriverError:
        pass
    except Exception:
        log.exception("a step could not be prepared in advance")
