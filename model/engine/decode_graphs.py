"""The graphs of decode steps: of several at once, and of those that will come."""

from __future__ import annotations

from dataclasses import replace

from urdir.model.engine.batch import Output, ShapeBuckets, StepShape
from urdir.model.engine.run_ahead import AT_ONCE
from urdir.model.engine.runner import Steps

#: Tokens before its end at which the next length bucket is prepared.
LOOK_AHEAD = 128


class DecodeGraphs:
    """Which of ``steps`` serve sequences that go on, in the buckets ``shapes``."""

    def __init__(self, steps: Steps, shapes: ShapeBuckets) -> None:
        self._steps = steps
        self._shapes = shapes

    def several(self, shape: StepShape, length: int) -> StepShape | None:
        """`AT_ONCE` steps in place of one of ``shape``, after which the longest sequence has
        ``length`` tokens at most; None where they have no graph (yet), or reach beyond the shape's
        length bucket, also if that is the last one."""
        if shape.prompt or length + (AT_ONCE - 1) * (1 + shape.drafts) > shape.keys:
            return None
        several = replace(shape, steps=AT_ONCE)
        return several if self._steps.is_recorded(several) else None

    def prepare(
        self,
        rows: int,
        output: Output,
        length: int,
        end: int,
        steps: int,
        drafted: bool = False,
    ) -> bool:
        """Do a small piece of preparing for ``rows`` sequences (``drafted``: with their drafts),
        the longest of which has ``length`` tokens, none of which will have more than ``end``; False
        where all is done. They go on by up to ``steps`` steps at once."""
        most = 1 + self._shapes.drafts if drafted else 1

        def missing(length: int, steps: int = 1) -> bool:
            return self._steps.prepare(self._shapes.decode(rows, length, output, steps, drafted))

        if length < end and missing(min(length + most, end)):
            return True
        later = min(length + LOOK_AHEAD, end)
        if later > length and missing(later):
            return True
        several = length + 2 * steps * most
        if steps == 1 or several > later:
            return False  # too few tokens left to pay for it
        return missing(several, steps) or missing(later, steps)

    def prepare_all(
        self,
        rows: int,
        output: Output,
        length: int,
        end: int,
        steps: int,
        drafted: bool = False,
    ) -> None:
        """Record all graphs that ``rows`` sequences use from ``length`` tokens to ``end``, so that
        none is recorded on the way; see `prepare`."""
        for reached in range(length, end):
            while self.prepare(rows, output, reached, end, steps, drafted):
                self._steps.wait_for_helper()
