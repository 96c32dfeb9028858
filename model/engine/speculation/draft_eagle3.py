"""EAGLE-3 drafts (`families.eagle3`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    GIVEN,
    JOINED,
    PASSED_ON,
    DraftParts,
    TokenRows,
    append_embedded,
    append_joined,
    append_logits,
    append_norm,
)
from urdir.model.engine.speculation.draft_streams import append_given_streams
from urdir.model.families.eagle3 import Eagle3
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import attention, cached_keys
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.dense import dense
from urdir.model.lower.step import lower
from urdir.model.memory.draft_memory import STREAM

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import Rows


@dataclass(frozen=True, slots=True)
class Eagle3Draft:
    """The draft that ``parts.own`` describes."""

    parts: DraftParts
    heads: int = 1
    lag: int = 1
    moves: bool = True

    @property
    def draft(self) -> Eagle3:
        """Its description."""
        config = self.parts.own.config
        assert isinstance(config, Eagle3)
        return config

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The product of the model's streams side by side, normalised if the draft is."""
        own, draft = self.parts.own, self.draft
        norm = None if draft.streams_norm is None else own.weights.norm(draft.streams_norm)
        append_given_streams(plan, self.parts, draft, rows, own.work[GIVEN], norm)

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of the layer alone."""
        x = self._append_input(plan, rows, tokens, hidden)
        own, draft = self.parts.own, self.draft
        step = StepOps(own.config, rows.count)
        joined = step.graph.input(Tensor("joined", rows.count, draft.mixer.q.cols))
        cached_keys(LayerOps(step, head), draft.mixer, joined)
        lower(plan, own, rows, step.graph, fixed={joined: x})

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits, and the layer's result as it is passed on."""
        own, draft, work = self.parts.own, self.draft, self.parts.own.work
        x, before = self._append_input(plan, rows, tokens, hidden), hidden
        if draft.norm_before_residual:
            before = work[STREAM]
            norm = own.weights.norm(draft.hidden_norm)
            vectors = (hidden, before, draft.hidden)
            append_norm(plan, rows.count, "draft.residual", norm, vectors)
        step = StepOps(own.config, rows.count)
        joined = step.graph.input(Tensor("joined", rows.count, draft.mixer.q.cols))
        stream = step.graph.input(step.stream())
        at = LayerOps(step, head, residual=stream)
        attended = attention(at, draft.mixer, joined, 1.0)
        total = at.add("attn_output.residual", stream, attended)
        network, ffn_norm = draft.network
        made = dense(at, network, at.norm("ffn_norm", total, ffn_norm), 1.0)
        passed = at.add("ffn_down.residual", total, made)
        fixed = {joined: x, stream: before, passed: work[PASSED_ON]}
        lower(plan, own, rows, step.graph, fixed=fixed)
        assert draft.output_norm is not None
        norm_of = draft.output_norm
        append_logits(plan, self.parts, rows, self.parts.output, work[PASSED_ON], norm_of)

    def _append_input(self, plan: Plan, rows: Rows, tokens: TokenRows, hidden: Slice) -> Slice:
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
        return work[JOINED]
