"""By which recorded graphs steps run, and which further ones should be recorded.

Graphs of prompts with little padding are not recorded ahead: there are hundreds of shapes, and each
graph takes 50 ms of the host, a second or two of the processes that compile its kernels, and 1 MB.
One is recorded where it would have spared steps many rows of padding, and a coarser one that serves
more prompts where it spares more. A step runs by the one with the fewest rows that has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.batch import Batch, Grain, Output, Segment, StepShape
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.memory.buckets import COMMON_ROWS, ROWS, STEP_ROWS, two_steps

if TYPE_CHECKING:
    from urdir.model.engine.session import Session

#: A shape is recorded where steps that took others lost this many rows, each of which takes 20 us
#: (8B Q4_K_M, an H200), within this many steps with prompts. A lesser share of a step's rows is no
#: loss. A greedy step that draws tokens counts as the last number of rows.
_LOST, _WITHIN, _SHARE, _DRAWN = 256, 1024, 0.03, 64
#: Shapes that wait to be recorded, at most: each has room in the memory for graphs.
_WISHES = 8
_NOTHING = 0, 0
#: As much of the memory for graphs is left to shapes that steps need: beyond it a shape takes the
#: place of another one that was recorded so, and that no step took for `_WITHIN` steps.
_SPARE = 0.25


class RecordedShapes:
    """Shapes of the steps of ``session``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0  # with prompts
        self._lost: dict[StepShape, tuple[int, int]] = {}  # spared rows, and those taken
        self._wishes: dict[StepShape, None] = {}  # the oldest first
        self._made: dict[StepShape, int] = {}  # the step that took it last; the oldest first

    @property
    def wished(self) -> tuple[StepShape, ...]:
        """Shapes that are to be recorded, until they are."""
        for shape in filter(self._session.steps.is_recorded, [*self._wishes]):
            del self._wishes[shape]
            if shape.prompt:
                self._taken(shape)
        return tuple(self._wishes)

    def prepare(self) -> bool:
        """Do a small piece of recording one of them, see `Steps.prepare`; False where nothing is
        left to do. One that cannot be recorded gives way to others."""
        wished, steps = self.wished, self._session.steps
        shape = next((of for of in wished if not steps.waits(of)), None)
        if shape is None:
            return bool(wished)
        try:
            return steps.prepare(shape) or len(wished) > 1
        except Exception:
            del self._wishes[shape]
            raise

    def ready(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """The shape, or a recorded one that serves as well: with other numbers of rows; or of steps
        that draw tokens, which include greedy ones, until ``shape`` is recorded."""
        if shape.prompt:
            return self._with_prompts(plan, shape)
        for each in _including(shape):
            found = self.recorded(each) if shape.drafts or _is_fine(shape) else each
            if self._session.steps.is_recorded(found):
                rows = found.rows if each is shape else shape.rows + _DRAWN
                if rows > shape.rows * (1 + _SHARE) and not shape.drafts:
                    self._add_lost(shape, rows)
                    self._wish(shape)
                return found
        return shape

    def recorded(self, shape: StepShape) -> StepShape:
        """The smallest shape with room for the rows of ``shape``, a decode step, that is recorded:
        numbers of drafts change from step to step, and not all numbers of sequences are recorded
        ahead. ``shape`` itself if none is."""
        steps, most = self._session.steps, self._session.parts.state.rows
        if steps.observer is None:
            rows = (rows for rows in ROWS if shape.rows <= rows <= most)
            shapes = (replace(shape, rows=count) for count in rows)
            return next((each for each in shapes if steps.is_recorded(each)), shape)
        return shape

    def following(self, rows: int, length: int, output: Output) -> StepShape:
        """What a decode step of this many rows will be launched by."""
        shape = self._session.shapes.decode(rows, length, output)
        found = [self.recorded(of) if _is_fine(of) else of for of in _including(shape)]
        return next((of for of in found if self._session.steps.is_recorded(of)), found[0])

    def takes_whole(self, start: int, end: int, output: Output) -> bool:
        """Whether one step with all that is left of a prompt alone is faster than two: by a graph
        with little padding, which is recorded."""
        shapes, rows = self._session.shapes, end - start
        if rows > shapes.chunks[-1] or shapes.first(rows) == rows:
            return False
        _, taken = two_steps(rows, shapes.chunks)
        most = int(taken) - STEP_ROWS  # rows of one step that takes as long
        batch = Batch((), (Segment(0, start, end, chooses=True),))
        coarse = shapes.of_batch(batch, end, output)
        for each in _including(coarse):
            finer = self._finer(batch, end, each)
            if finer and (found := self._fewest(finer)) is not None and found.rows < most:
                return True
        used = filter(self._session.steps.is_recorded, _including(coarse))
        if finer := self._finer(batch, end, next(used, coarse)):
            self._lose(finer, most)
        return False

    def _with_prompts(self, plan: StepPlan, coarse: StepShape) -> StepShape:
        """The shape with the fewest rows that is recorded, of a step with prompts; ``coarse`` if
        there is none. Those that would have spared many are wished for."""
        self._next_step()
        for each in _including(coarse):
            wanted = [*self._finer(plan.batch, plan.longest, each), each]
            found = self._fewest(wanted) or self._with_more_rows(each)
            if self._session.steps.is_recorded(found):
                if found in self._made:
                    self._taken(found)
                if found is not wanted[0]:
                    self._lose(wanted, found.rows)
                return found
        return coarse

    def _finer(self, batch: Batch, length: int, coarse: StepShape) -> list[StepShape]:
        """The shapes of fewer rows than the ``coarse`` one, the finest first."""
        shapes, finer = self._session.shapes, (Grain.FINE, Grain.MIDDLE)
        if batch.decode or len(batch.segments) > 1:
            of_batch = (shapes.of_batch(batch, length, coarse.output, grain) for grain in finer)
            found = [replace(shape, part=coarse.part) for shape in of_batch]
        else:
            rows = batch.segments[0].end - batch.segments[0].start
            found = [shapes.fine(coarse, rows, grain) for grain in finer]
        return [shape for shape in dict.fromkeys(found) if shape.rows < coarse.rows]

    def _fewest(self, wanted: Sequence[StepShape]) -> StepShape | None:
        """The recorded shape with the fewest rows of the ``wanted`` ones, the finest first, and of
        those recorded for other steps that have room for its rows."""
        finest, is_recorded = wanted[0], self._session.steps.is_recorded
        if is_recorded(finest):
            return finest
        others = (of for of in self._made if _has_room(of, finest))
        found = sorted((*wanted[1:], *others), key=lambda of: of.rows)
        return next(filter(is_recorded, found), None)

    def _with_more_rows(self, shape: StepShape) -> StepShape:
        """The shape of a step with one prompt alone, or until its graph is recorded the next one
        with more rows that has a graph."""
        steps, chunks = self._session.steps, self._session.shapes.chunks
        if shape.walk.count or shape.decode or shape.segments > 1:
            return shape
        more = (replace(shape, rows=n, prompt=n) for n in chunks if n > shape.rows)
        return next((each for each in more if steps.is_recorded(each)), shape)

    def _taken(self, shape: StepShape) -> None:
        """A shape that was wished for serves a step, or will serve the next one."""
        self._made.pop(shape, None)
        self._made[shape] = self._steps

    def _next_step(self) -> None:
        """A step with prompts comes: of those before, only the latest count."""
        self._steps += 1
        if not self._steps % _WITHIN:
            self._lost.clear()

    def _lose(self, wanted: Sequence[StepShape], rows: int) -> None:
        """A step takes as long as one of ``rows`` rows, or by what is going to be recorded, in
        place of one of the ``wanted`` shapes. Of these that which would have spared most by now is
        recorded if that is many rows."""
        coming = (of.rows for of in self._wishes if _has_room(of, wanted[0]))
        rows = min((rows, *coming))
        for shape in wanted:
            if rows > shape.rows * (1 + _SHARE):
                self._add_lost(shape, rows)
        self._wish(max(wanted, key=self._lost_by))

    def _lost_by(self, shape: StepShape) -> int:
        """Rows that a shape would have spared."""
        return self._lost.get(shape, _NOTHING)[0]

    def _add_lost(self, shape: StepShape, rows: int) -> None:
        self._lost[shape] = self._lost_by(shape) + rows - shape.rows, rows

    def _wish(self, shape: StepShape) -> None:
        """Have a shape recorded, if it would have spared many rows: others spare less then."""
        if self._lost_by(shape) < _LOST or len(self._wishes) >= _WISHES or shape in self._wishes:
            return
        if self._makes_room():
            self._wishes[shape] = None
            for other, (_, rows) in [*self._lost.items()]:
                if shape.rows < rows and _has_room(shape, other):
                    del self._lost[other]

    def _makes_room(self) -> bool:
        """Whether memory is left for one more shape, maybe that of one no step takes any more."""
        steps = self._session.steps
        if steps.free_share > _SPARE:
            return True
        for oldest, used in [*self._made.items()]:
            if self._steps - used < _WITHIN:
                break
            del self._made[oldest]
            if steps.is_recorded(oldest):  # not forgotten for others
                steps.forget(oldest)
                return True
        return False


def _has_room(shape: StepShape, wanted: StepShape) -> bool:
    """Whether a shape of steps with prompts has all rows that ``wanted`` has, of the same kind."""
    if shape.rows < wanted.rows or shape.prompt < wanted.prompt or shape.decode < wanted.decode:
        return False
    if shape.outputs < wanted.outputs or shape.segments < wanted.segments:
        return False
    return _kind(shape) == _kind(wanted)


def _kind(shape: StepShape) -> tuple[object, ...]:
    """What a step with prompts is, without its rows."""
    several = shape.segments > 1, shape.decode > 0
    return (*several, shape.keys, shape.output, shape.begins, shape.walk, shape.part)


def _is_fine(shape: StepShape) -> bool:
    """Whether a decode step has a number of rows whose graphs are not recorded ahead."""
    return not shape.prompt and shape.rows not in COMMON_ROWS


def _including(shape: StepShape) -> tuple[StepShape, ...]:
    """The shape, and that of steps whose output includes its own."""
    if shape.output is not Output.GREEDY or shape.drafts:
        return (shape,)
    return shape, replace(shape, output=Output.SAMPLE)
