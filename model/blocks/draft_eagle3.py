"""EAGLE-3 drafts (`families.eagle3`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.attention_network import append_attention, append_keys
from urdir.model.blocks.draft import (
    EMBEDDED,
    GIVEN,
    JOINED,
    PASSED_ON,
    DraftParts,
    TokenRows,
    append_embedded,
    append_joined,
    append_logits,
)
from urdir.model.blocks.draft_streams import append_given_streams
from urdir.model.blocks.feed_forward import append_dense
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.eagle3 import Eagle3

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.blocks.rows import Rows
    from urdir.model.memory.weights import Matrix


@dataclass(frozen=True, slots=True)
class Eagle3Draft:
    """The draft that ``parts.own`` describes."""

    parts: DraftParts
    heads: int = 1
    lag: int = 1

    @property
    def draft(self) -> Eagle3:
        """Its description."""
        config = self.parts.own.config
        assert isinstance(config, Eagle3)
        return config

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The product of the model's streams side by side, normalised where the draft says so."""
        own, draft = self.parts.own, self.draft
        norm = None if draft.streams_norm is None else own.weights.norm(draft.streams_norm)
        append_given_streams(plan, self.parts, draft, rows, own.work[GIVEN], norm)

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of the layer alone."""
        x = self._append_input(plan, rows, tokens, hidden)
        append_keys(LayerStep(plan, self.parts.own, rows, head), self.draft.mixer, x, None)

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits, and the layer's result as it is passed on."""
        own, draft, work = self.parts.own, self.draft, self.parts.own.work
        at, passed = LayerStep(plan, own, rows, head), work[PASSED_ON]
        x = self._append_input(plan, rows, tokens, hidden)
        before = hidden
        if draft.norm_before_residual:
            before = work["hidden"]
            norm = own.weights.norm(draft.hidden_norm)
            at.linear.append_norm("draft.residual", draft.hidden, Activations(hidden), norm, before)
        network, ffn_norm = draft.network
        norm = own.weights.norm(ffn_norm)
        to = Destination(at.free(before), before, norm)
        x = append_attention(at, draft.mixer, x, None, to)
        append_dense(at, network, x, norm, Destination(passed, x.x, None))
        assert draft.output_norm is not None
        norm = own.weights.norm(draft.output_norm)
        append_logits(plan, self.parts, rows, self._output, Activations(passed), norm)

    @property
    def _output(self) -> Matrix:
        target = self.parts.target
        if self.draft.shares_output:
            return target.weights.matrix(target.config.output.matrix)
        return self.parts.own.weights.matrix(self.draft.output)

    def _append_input(
        self, plan: Plan, rows: Rows, tokens: TokenRows, hidden: Slice
    ) -> Activations:
        """What attention multiplies: embedding and hidden state side by side, normalised."""
        own, draft, target = self.parts.own, self.draft, self.parts.target
        work, weights = own.work, own.weights
        if draft.shares_embedding:
            table = target.weights.matrix(target.config.embedding)
        else:
            table = weights.matrix(draft.embedding)
        append_embedded(plan, rows.count, table, tokens, work[EMBEDDED])
        sources = [
            (work[EMBEDDED], weights.norm(draft.token_norm)),
            (hidden, weights.norm(draft.hidden_norm)),
        ]
        append_joined(plan, "draft.join", rows.count, draft.hidden, sources, work[JOINED])
        return Activations(work[JOINED])
