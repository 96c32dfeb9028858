"""Drafts of heads that read hidden states, in the steps of their model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from urdir.model.engine.speculation.draft import EMBEDDED, GIVEN, PASSED_ON, HeadLaunches, TokenRows
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.model_source import BEFORE, PLACES, ModelSource
from urdir.model.engine.speculation.source import Pieces
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import Rows
from urdir.model.memory.draft_model import held_slots
from urdir.model.memory.kv_cache import KvCache
from urdir.ptxgen.kernels.speculation.hidden_before import HiddenBefore
from urdir.ptxgen.kernels.speculation.hold_hidden import HoldHidden

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import StepShape
    from urdir.model.engine.speculation.model_source import Drafter


class HeadSource(ModelSource):
    """Heads that read the model's hidden states, and draft one token after the other."""

    #: The part of the state with the last positions that rows of drafts attend to.
    _seen = "draft_position"

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self._heads = cast("HeadLaunches", self._launches(drafter, parts))
        self._narrow_heads = cast("HeadLaunches", self._launches(drafter, parts, narrow=True))
        self.rest = DraftRest()

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""
        heads = self._narrow_heads if shape.narrow else self._heads
        work, state, of = self.own.work, self._state, self.draft_parts(parts, shape.narrow)
        answers = self._append_rows(plan, parts, shape, heads.lag)
        self._append_before(plan, parts, answers)
        rows = replace(self.rows(answers, shape.keys), position=state[self._seen])
        at = state["draft_sequence"], state["token_position"]
        tokens = TokenRows(parts.state["tokens"], parts.state.sequences, parts.state.max_len, *at)
        for step in range(self.drafts(shape)):
            hidden, number = work[PASSED_ON if step else GIVEN], step if heads.heads > 1 else 0
            for later in range(number + 1, heads.heads):
                heads.append_keys(plan, rows, later, tokens, hidden)
            if number + 1 < heads.heads:
                self._append_fence(plan, self._caches, work[EMBEDDED])
            heads.append_head(plan, rows, number, tokens, hidden)
            self._append_choice(plan, parts, answers, of.vocabulary(answers))
            yield

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: keys and values of all rows, and the hidden states of the last."""
        heads, work, state = self._heads, self.own.work, parts.state
        if (of := self._append_rested(plan, parts, shape, rows)) is None:
            return
        rows = of
        heads.append_given(plan, rows)
        plan.launch(
            HiddenBefore(*self._held_sizes(parts, rows.count), lag=heads.lag),
            "draft.before",
            x=work[GIVEN],
            held=self._state["held"],
            begun=self._state["begun"],
            place=work[PLACES],
            y=work[BEFORE],
            **rows.arguments,
        )
        kept = replace(rows, position=work[PLACES], begins=False, walk=None)
        at = rows.sequence, rows.position
        tokens = TokenRows(state["tokens"], state.sequences, state.max_len, *at)
        for number in range(heads.heads):
            heads.append_keys(plan, kept, number, tokens, work[BEFORE])
        self._append_held(plan, parts, rows)
        if shape.steps > 1:
            self._append_fence(plan, self._caches, work[EMBEDDED])
        yield

    def _held_sizes(self, parts: StepParts, rows: int) -> tuple[int, int, int, int, int]:
        """Sizes of kernels for hidden states of the last positions."""
        held, slots = self.model.held, held_slots(self.most)
        return held, parts.state.max_len, slots, rows, parts.state.sequences

    def _append_held(self, plan: Plan, parts: StepParts, rows: Rows) -> None:
        """Append what keeps the given hidden states of the last rows."""
        kernel, held = HoldHidden(*self._held_sizes(parts, rows.count)), self._state["held"]
        plan.launch(kernel, "draft.held", x=self.own.work[GIVEN], held=held, **rows.arguments)

    def _append_before(self, plan: Plan, parts: StepParts, answers: int) -> None:
        """Append what makes the hidden states before the pending tokens the given ones."""
        own = self._state
        plan.launch(
            HiddenBefore(*self._held_sizes(parts, answers), lag=self._heads.lag, alone=True),
            "draft.given",
            sequence=own["draft_sequence"],
            position=own["token_position"],
            held=own["held"],
            begun=own["begun"],
            place=own[self._seen],
            y=self.own.work[GIVEN],
        )


class AssistantSource(HeadSource):
    """A draft that reads the model's cache. All drafts of a sequence attend to the tokens before
    its pending one, with queries at the position of that: only the places of tokens move on. Of
    other steps hidden states are kept."""

    _seen = "seen_position"

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self.rest = None

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: the hidden states of the last rows."""
        self._heads.append_given(plan, rows)
        self._append_held(plan, parts, rows)
        yield

    def _append_rows(
        self, plan: Plan, parts: StepParts, shape: StepShape, lag: int, before: bool = False
    ) -> int:
        return super()._append_rows(plan, parts, shape, 0)

    @property
    def _caches(self) -> list[Slice]:
        return []
