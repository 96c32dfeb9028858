"""A draft of whole blocks of tokens beside a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.driver.plan import Plan
from urdir.model.engine.chain_drafts import Values
from urdir.model.engine.drafts import Draft, DraftShape, DraftStep
from urdir.model.engine.speculation.draft import TokenRows, append_tokens_of
from urdir.model.engine.speculation.draft_dflash import Block, DFlashDraft
from urdir.model.engine.speculation.markov_tokens import append_markov_tokens
from urdir.model.engine.speculation.selected_tokens import append_selected_tokens
from urdir.model.lower.rows import Rows
from urdir.model.memory.draft_memory import BlockRows

if TYPE_CHECKING:
    from urdir.model.engine.session import Session


class BlockDraft(Draft):
    """A `Draft` whose tokens are proposed in one pass: the last token and masks after it, the rows
    of a *block*, each of which proposes one, but the first only if the draft is anchored."""

    launches: DFlashDraft

    def __init__(self, session: Session, shape: DraftShape, *args: Any) -> None:
        with ExitStack() as owners:
            rows = shape.rows.rows, shape.slots, shape.block_rows
            block = BlockRows(session.parts.device, *rows, session.stream)
            self.block = owners.enter_context(block)
            super().__init__(session, shape, *args)
            self._owners.push(owners.pop_all())

    def _largest_steps(self) -> Iterator[DraftStep]:
        """See `Draft`."""
        yield from super()._largest_steps()
        rows, keys = self.shape.block_rows, self.shape.cache.max_len
        yield DraftStep("block", rows, keys, drafts=self.shape.slots)

    def propose(self, lasts: Sequence[tuple[int, int, int]], count: int) -> list[list[int]]:
        """See `Draft.propose`; what is given is kept first. A block always has all of its slots:
        its rows see each other, so that fewer ones would propose others."""
        self._run(self.write_given(lasts))
        self._run(self.write_block(lasts))
        return self.read_block(len(lasts), count)

    def read_block(self, rows: int, count: int) -> list[list[int]]:
        """The ``count`` tokens that are drafted after each of the first ``rows``."""
        if self.launches.draft.chooses_in_turn:
            return self.read_drafts(rows, count)
        shape = (self.shape.slots, self.shape.rows.rows)
        chosen = self.block["chosen"].download(np.uint32, shape)
        return [chosen[1 : 1 + count, row].tolist() for row in range(rows)]

    @property
    def block_logits(self) -> Values:
        """The logits (slots, vocab) f32 of the first block of the last step."""
        shape = (self.shape.slots, self.shape.rows.rows, self.parts.own.config.vocab_size)
        return self.parts.own.work["logits"].download(np.float32, shape)[:, 0]

    def write_given(self, lasts: Sequence[tuple[int, int, int]]) -> DraftStep:
        """Write the rows of hidden states that are given; returns the step that keeps them, with
        room for blocks after them."""
        rows, slots = self.shape.rows.rows, self.shape.slots
        at = self._write([(s, p) for s, p, _ in lasts], rows, prompt=False, more=slots)
        return DraftStep("keys", rows, self.session.shapes.keys(at, 2))

    def write_block(self, lasts: Sequence[tuple[int, int, int]]) -> DraftStep:
        """Write the rows of blocks; returns the step that drafts."""
        if self.launches.draft.chooses_in_turn:
            self.rows.write_last([token for *_, token in lasts])
        rows, slots, draft = self.shape.block_rows, self.shape.slots, self.launches.draft
        self.block.write(lasts, draft.mask, rows, causal=draft.causal)
        longest = max(position for _, position, _ in lasts) + slots
        return DraftStep("block", rows, self.session.shapes.keys(longest, 2), drafts=slots)

    def append(self, plan: Plan, step: DraftStep) -> None:
        """Append the launches of a step."""
        if step.kind != "block":
            super().append(plan, step)
            return
        block = self.block
        rows = Rows(step.rows, step.keys, 0, block["sequence"], block["position"])
        tokens = TokenRows(block["tokens"], block.rows, block.slots, block["row"], block["slot"])
        slots = Block(step.drafts, block.rows, block["end"])
        self.launches.append_block(plan, rows, tokens, slots)
        self._append_choice(plan, rows)

    def _append_choice(self, plan: Plan, rows: Rows) -> None:
        """The tokens of the rows of blocks."""
        parts, draft = self.parts, self.launches.draft
        if not draft.chooses_in_turn:
            logits = parts.own.work["logits"]
            append_tokens_of(plan, parts, rows.count, logits, (self.block["chosen"], 1, 0))
            return
        slots = range(0 if draft.anchored else 1, self.shape.slots)
        if draft.selector is not None:
            append_selected_tokens(plan, parts, self.block.rows, draft.selector, self.chain, slots)
        elif draft.markov is not None:
            of_slot = replace(rows, count=self.block.rows)
            append_markov_tokens(plan, parts, of_slot, draft.markov, self.chain, slots)
