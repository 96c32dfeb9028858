"""Heads for predicting several tokens (`families.nextn`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    GIVEN,
    JOINED,
    PASSED_ON,
    DraftParts,
    DraftProduct,
    TokenRows,
    append_embedded,
    append_joined,
    append_logits,
    append_norm,
    append_product,
)
from urdir.model.families.tapped import tap
from urdir.model.graph.ops import Norm
from urdir.model.layers.builder import StepOps
from urdir.model.layers.layer import layer as layer_ops
from urdir.model.layers.layer import layer_keys
from urdir.model.lower.step import lower
from urdir.model.memory.draft_memory import STREAM
from urdir.model.memory.workspace import saved
from urdir.ptxgen.kernels.rescale import Rescale

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.nextn import NextnHead
    from urdir.model.lower.rows import Rows


@dataclass(frozen=True, slots=True)
class NextnDraft:
    """The heads of ``parts.target``'s description; ``parts.own`` has them as its layers
    (`tapped.nextn_heads`), and the same weights."""

    parts: DraftParts
    lag: int = 0
    moves: bool = True

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return len(self.parts.target.config.nextn)

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The model's stream after its layers, normalised if the heads take it so."""
        own, target = self.parts.own, self.parts.target
        config, to = target.config, own.work[GIVEN]
        stream = target.work[saved(tap(config.n_layers))]
        if not config.nextn[0].passes_normed:
            plan.launch(Rescale(rows.count * config.hidden), "draft.given", x=stream, y=to)
        elif config.output_norm is not None:
            norm = target.weights.norm(config.output_norm)
            append_norm(plan, rows.count, "draft.given", norm, (stream, to, config.hidden))

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of a head alone."""
        x = self._append_input(plan, rows, head, tokens, hidden)
        own = self.parts.own
        step = StepOps(own.config, rows.count)
        stream = step.graph.input(step.stream())
        layer_keys(step, head, stream)
        lower(plan, own, rows, step.graph, fixed={stream: x})

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits and the hidden states that are passed on: of one whole layer."""
        own, of = self.parts.own, self._head(head)
        x = self._append_input(plan, rows, head, tokens, hidden)
        passed, step = own.work[PASSED_ON], StepOps(own.config, rows.count)
        stream = step.graph.input(step.stream())
        made = layer_ops(step, head, stream, of=own.config.layers[head])
        if of.passes_normed:
            made = step.graph.add(Norm("draft.norm", step.stream(), made, of.norm))
        lower(plan, own, rows, step.graph, fixed={stream: x, made: passed})
        vocab = self.parts.vocabulary(rows.count)
        output = DraftProduct("draft.output", own.weights, of.output, rows=vocab)
        norm = None if of.passes_normed else of.norm
        append_logits(plan, self.parts, rows, output, passed, norm)

    def _head(self, head: int) -> NextnHead:
        return self.parts.target.config.nextn[head]

    def _append_input(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> Slice:
        """What the layer begins with: the product of embedding and hidden state side by side."""
        own, of = self.parts.own, self._head(head)
        work, weights, x = own.work, own.weights, own.work[STREAM]
        append_embedded(plan, rows.count, weights.matrix(of.embedding), tokens, work[EMBEDDED])
        sources = [
            (work[EMBEDDED], weights.norm(of.embedding_norm)),
            (hidden, weights.norm(of.hidden_norm)),
        ]
        append_joined(plan, "draft.join", rows.count, own.config.hidden, sources, work[JOINED])
        product = DraftProduct("draft.eh_proj", weights, of.join)
        append_product(plan, own, rows, product, work[JOINED], x)
        return x
