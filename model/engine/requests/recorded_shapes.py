"""By which recorded graphs steps run, and which further ones should be recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.batch import Batch, Grain, Output, Segment, StepShape
from urdir.model.engine.requests.step_plan import StepPlan
from urdir.model.memory.buckets import COMMON_ROWS, ROWS

if TYPE_CHECKING:
    from urdir.model.engine.session import Session

#: A shape is recorded after this many steps that took a slower one, if as much of the memory for
#: graphs is left; a step with prompts is slower if more than this share of its rows is padding.
#: As many further rows of padding count as a step.
_OFTEN, _SPARE, _PADDING, _MUCH = 4, 0.25, 0.03, 256


class RecordedShapes:
    """Shapes of the steps of ``session``. ``wished``: one that steps come by often, and that is to
    be recorded."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wishes: Counter[StepShape] = Counter()  # steps that took another shape than these
        self.wished: StepShape | None = None

    def ready(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """The shape, or a recorded one that serves as well: with other numbers of rows; or of steps
        that draw tokens, which include greedy ones, until ``shape`` is recorded."""
        for each in _including(shape):
            found = each
            if shape.drafts or _is_fine(shape):
                found = self.recorded(each)
            elif plan.batch.segments and len(plan.members) > 1:
                found = self._with_less_padding(plan, each)
            elif shape.prompt:
                found = self._of_one_prompt(plan, each)
            if self._session.steps.is_recorded(found):
                if each is not shape:
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
        with little padding, which is recorded. One that comes often will be."""
        shapes = self._session.shapes
        if end - start > shapes.chunks[-1] or shapes.first(end - start) == end - start:
            return False
        batch = Batch((), (Segment(0, start, end, chooses=True),))
        coarse = shapes.of_batch(batch, end, output)
        fine = shapes.fine(coarse, end - start)
        if fine.rows == coarse.rows:
            return False
        if any(self._session.steps.is_recorded(of) for of in _including(fine)):
            return True
        self._wish(fine)
        return False

    def _of_one_prompt(self, plan: StepPlan, coarse: StepShape) -> StepShape:
        """The shape of a step with one prompt alone: with little padding, if its graph is recorded.
        One that comes often will be."""
        segments = plan.batch.segments
        if len(segments) == 1 and not plan.batch.decode:
            fine = self._session.shapes.fine(coarse, segments[0].end - segments[0].start)
            if fine.rows < coarse.rows and self._session.steps.is_recorded(fine):
                return fine
            if coarse.rows > fine.rows * (1 + _PADDING):
                self._wish(fine)
        return self._with_more_rows(coarse)

    def _with_more_rows(self, shape: StepShape) -> StepShape:
        """The shape of a step with one prompt alone, or until its graph is recorded the next one
        with more rows that has a graph."""
        steps, chunks = self._session.steps, self._session.shapes.chunks
        if shape.walk.count or steps.is_recorded(shape):
            return shape
        more = (replace(shape, rows=n, prompt=n) for n in chunks if n > shape.rows)
        found = next((each for each in more if steps.is_recorded(each)), shape)
        if found is not shape:
            self._wish(shape, 1 + (found.rows - shape.rows) // _MUCH)
        return found

    def _with_less_padding(self, plan: StepPlan, coarse: StepShape) -> StepShape:
        """The shape with the least padding that is recorded, of a step with prompts beside others;
        else the ``coarse`` one. Where such steps come often, one with less will be."""
        shapes, steps = self._session.shapes, self._session.steps
        batch = plan.batch, plan.longest, coarse.output
        found = [shapes.of_batch(*batch, grain) for grain in (Grain.FINE, Grain.MIDDLE)]
        finer = [replace(of, part=coarse.part) for of in found if of.rows < coarse.rows]
        shape = next((shape for shape in finer if steps.is_recorded(shape)), coarse)
        for other in finer:  # the one that serves more steps last, to be recorded first
            if shape.rows > other.rows * (1 + _PADDING):
                self._wish(other)
        return shape

    def _wish(self, shape: StepShape, times: int = 1) -> None:
        """Steps by another shape would be faster: one that comes often is recorded. This step
        counts ``times``."""
        self._wishes[shape] += times
        if self._wishes[shape] >= _OFTEN and self._session.steps.free_share > _SPARE:
            self.wished = shape


def _is_fine(shape: StepShape) -> bool:
    """Whether a decode step has a number of rows whose graphs are not recorded ahead."""
    return not shape.prompt and shape.rows not in COMMON_ROWS


def _including(shape: StepShape) -> tuple[StepShape, ...]:
    """The shape, and that of steps whose output includes its own."""
    if shape.output is not Output.GREEDY or shape.drafts:
        return (shape,)
    return shape, replace(shape, output=Output.SAMPLE)
