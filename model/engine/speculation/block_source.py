"""Drafts of whole blocks (DFlash, DSpark), in the steps of their model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from urdir.model.engine.speculation.draft import GIVEN, TokenRows
from urdir.model.engine.speculation.draft_dflash import Block
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.markov_tokens import append_confidence, append_markov_sum
from urdir.model.engine.speculation.model_source import ModelSource
from urdir.model.engine.speculation.selected_tokens import append_selection
from urdir.model.engine.speculation.source import Pieces
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rows import Rows
from urdir.model.memory.draft_memory import STREAM
from urdir.model.memory.draft_model import BLOCK_ROWS
from urdir.model.memory.kv_cache import KvCache
from urdir.ptxgen.kernels.speculation.block_rows import BlockRows

if TYPE_CHECKING:
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import StepShape
    from urdir.model.engine.speculation.draft_dflash import DFlashDraft
    from urdir.model.engine.speculation.model_source import Drafter


class BlockSource(ModelSource):
    """A draft of whole blocks (DFlash). It keeps keys and values of what the model's streams give
    at each position; those of a block are overwritten in the step that verifies it."""

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self._block = cast("DFlashDraft", self._launches(drafter, parts))
        self.rest = DraftRest()

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`. Rows of a block beyond the drafts that are wanted are padding."""
        draft, state = self._block.draft, self._state
        answers, most = self._append_rows(plan, parts, shape, lag=0), self.drafts(shape)
        first, sequences = 0 if draft.anchored else 1, parts.state.sequences
        slots = min(draft.block, first + most)
        sizes = (answers, slots, parts.state.max_len, draft.mask, sequences)
        kernel = BlockRows(*sizes, causal=draft.causal, anchored=draft.anchored)
        block = {name: state[f"block {name}"] for name in BLOCK_ROWS}
        given = {p.name: block.get(p.name) or self._place(parts, p.name) for p in kernel.params}
        plan.launch(kernel, "draft.block", **given)
        count = answers * slots
        rows = Rows(count, shape.keys, 0, block["sequence"], block["position"])
        tokens = TokenRows(block["token"], count, 1, block["number"], block["first"])
        self._block.append_block(plan, rows, tokens, Block(slots, answers, block["end"]))
        if draft.chooses_in_turn:
            self._append_in_turn(plan, parts, self.rows(answers, shape.keys), range(first, slots))
            yield
            return
        vocab = self.own.config.vocab_size
        slices = self._append_ranks(plan, count, self.own.work["logits"], vocab)
        for slot in range(first, slots):
            self._append_token(plan, parts, answers, slices, slot * answers)
        yield

    def _append_in_turn(self, plan: Plan, parts: StepParts, rows: Rows, slots: range) -> None:
        """Append what chooses the tokens of ``slots`` one after the other."""
        selector, state, own = self._block.draft.selector, self._state, self.own
        at = state["draft_sequence"], state["token_position"]
        tokens = TokenRows(parts.state["tokens"], parts.state.sequences, parts.state.max_len, *at)
        likely = state["probability"].slice(0, 4 * rows.count) if self._p_min else None
        for slot in slots:
            if selector is not None:
                append_selection(plan, own, rows.count, selector, tokens, slot, likely)
                self._append_token(plan, parts, rows.count, 1)
            else:
                self._append_markov(plan, parts, rows, tokens, slot)

    def _append_markov(
        self, plan: Plan, parts: StepParts, rows: Rows, tokens: TokenRows, slot: int
    ) -> None:
        """Append what chooses the tokens of a slot, after the ``tokens`` before."""
        markov, state, own = self._block.draft.markov, self._state, self.own
        assert markov is not None
        logits = append_markov_sum(plan, own, rows, markov, tokens, slot)
        judged = markov.confidence is None
        slices = self._append_ranks(plan, rows.count, logits, own.config.vocab_size, judged)
        if self._p_min and markov.confidence is not None:
            width = 4 * rows.count * own.config.hidden
            x, y = self._block.last_state.slice(slot * width, width), state["probability"]
            append_confidence(plan, own, rows, markov, x, y)
        self._append_token(plan, parts, rows.count, slices)

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`."""
        if (of := self._append_rested(plan, parts, shape, rows)) is None:
            return
        rows = of
        self._block.append_given(plan, rows)
        at = rows.sequence, rows.position
        state = parts.state
        tokens = TokenRows(state["tokens"], state.sequences, state.max_len, *at)
        kept = replace(rows, begins=False, walk=None)
        self._block.append_keys(plan, kept, 0, tokens, self.own.work[GIVEN])
        if shape.steps > 1:
            self._append_fence(plan, self._caches, self.own.work[STREAM])
        yield
