"""Drafts of a model by itself, in the steps of another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.model_source import ModelSource
from urdir.model.engine.speculation.source import Pieces
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.step import lowering
from urdir.model.memory.kv_cache import KvCache

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import StepShape
    from urdir.model.engine.speculation.model_source import Drafter


class PlainSource(ModelSource):
    """A model by itself with the same tokens."""

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self.rest = DraftRest(of_tokens=True)

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""
        answers = self._append_rows(plan, parts, shape, lag=0, before=True)
        for number in range(self.drafts(shape)):
            if not number:  # with the tokens before: the last draft may have been accepted
                rows = self.rows(2 * answers, shape.keys, drafts=1)
            else:
                rows = self.rows(answers, shape.keys)
            step = StepOps(self.own.config, rows.count)
            x = layers(step, embedding(step))
            assert x is not None
            head(step, x)
            yield from lowering(plan, self.own, rows, step.graph)
            self._append_choice(plan, parts, answers, self.own.config.vocab_size)

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: the rows of steps with prompts."""
        if not shape.prompt:
            return
        step = StepOps(self.own.config, rows.count)
        layers(step, embedding(step), rows.count, wanted=False)
        kept = replace(rows, begins=False, walk=None)
        yield from lowering(plan, self.own, kept, step.graph)
