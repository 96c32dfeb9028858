"""Heads for predicting several tokens (`families.nextn`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
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
from urdir.model.blocks.layer import append_layer, append_layer_keys
from urdir.model.families.tapped import tap
from urdir.model.memory.workspace import saved
from urdir.ptxgen.kernels.rescale import Rescale

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.blocks.rows import Rows
    from urdir.model.families.nextn import NextnHead


@dataclass(frozen=True, slots=True)
class NextnDraft:
    """The heads of ``parts.target``'s description; ``parts.own`` has them as its layers
    (`tapped.nextn_heads`), and the same weights."""

    parts: DraftParts
    lag: int = 0

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return len(self.parts.target.config.nextn)

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The model's stream after its layers, normalised where the heads take it so."""
        own, target = self.parts.own, self.parts.target
        config, to = target.config, own.work[GIVEN]
        stream = target.work[saved(tap(config.n_layers))]
        if not config.nextn[0].passes_normed:
            plan.launch(Rescale(rows.count * config.hidden), "draft.given", x=stream, y=to)
        elif config.output_norm is not None:
            norm = target.weights.norm(config.output_norm)
            linear = own.linear(plan, rows)
            linear.append_norm("draft.given", config.hidden, Activations(stream), norm, to)

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of a head alone."""
        x = self._append_input(plan, rows, head, tokens, hidden)
        append_layer_keys(plan, self.parts.own, rows, head, x)

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits and the hidden states that are passed on: of one whole layer."""
        own, of = self.parts.own, self._head(head)
        x = self._append_input(plan, rows, head, tokens, hidden)
        linear, norm, passed = (
            own.linear(plan, rows),
            own.weights.norm(of.norm),
            own.work[PASSED_ON],
        )
        output = own.weights.matrix(of.output)
        layer = own.config.layers[head]
        if not of.passes_normed:
            append_layer(plan, own, rows, head, x, passed, layer=layer)
            append_logits(plan, self.parts, rows, output, Activations(passed), norm)
            return
        made = linear.complete(append_layer(plan, own, rows, head, x, layer=layer))
        linear.append_norm("draft.norm", own.config.hidden, made, norm, passed)
        append_logits(plan, self.parts, rows, output, Activations(passed), None)

    def _head(self, head: int) -> NextnHead:
        return self.parts.target.config.nextn[head]

    def _append_input(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> Activations:
        """What the layer begins with: the product of embedding and hidden state side by side."""
        own, of = self.parts.own, self._head(head)
        work, weights, x = own.work, own.weights, own.work["hidden"]
        append_embedded(plan, rows.count, weights.matrix(of.embedding), tokens, work[EMBEDDED])
        sources = [
            (work[EMBEDDED], weights.norm(of.embedding_norm)),
            (hidden, weights.norm(of.hidden_norm)),
        ]
        append_joined(plan, "draft.join", rows.count, own.config.hidden, sources, work[JOINED])
        product = [(weights.matrix(of.join), x)]
        own.linear(plan, rows).append("draft.eh_proj", product, Activations(work[JOINED]))
        return Activations(x)
