"""Heads for predicting several tokens (`families.nextn`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import joined_streams
from urdir.model.layers.layer import layer as layer_ops
from urdir.model.layers.layer import layer_keys
from urdir.model.lower.step import lower
from urdir.model.memory.draft_memory import STREAM
from urdir.model.memory.workspace import saved
from urdir.ptxgen.kernels.rescale import Rescale
from urdir.ptxgen.kernels.streams import STREAMS, Streams

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.nextn import NextnHead
    from urdir.model.lower.rows import Rows


#: Of models with several streams: the tokens' embeddings in each, and the sum of the streams.
WIDENED, MERGED = "widened", "merged streams"


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
            plan.launch(Rescale(rows.count * config.stream_width), "draft.given", x=stream, y=to)
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
        stream = step.graph.input(Tensor(STREAM, rows.count, own.config.stream_width))
        layer_keys(step, head, stream)
        lower(plan, own, rows, step.graph, fixed={stream: x})

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits and the hidden states that are passed on: of one whole layer."""
        own, of = self.parts.own, self._head(head)
        x = self._append_input(plan, rows, head, tokens, hidden)
        passed, step = own.work[PASSED_ON], StepOps(own.config, rows.count)
        stream = step.graph.input(Tensor(STREAM, rows.count, own.config.stream_width))
        made = layer_ops(step, head, stream, of=own.config.layers[head])
        if of.passes_normed:
            made = step.graph.add(Norm("draft.norm", step.stream(), made, of.norm))
        fixed, last = {stream: x, made: passed}, passed
        if own.config.has_streams:
            last = own.work[MERGED]
            fixed[joined_streams(step, made)] = last
        lower(plan, own, rows, step.graph, fixed=fixed)
        vocab = self.parts.vocabulary(rows.count)
        output = DraftProduct("draft.output", own.weights, of.output, rows=vocab)
        norm = None if of.passes_normed else of.norm
        append_logits(plan, self.parts, rows, output, last, norm)

    def _head(self, head: int) -> NextnHead:
        return self.parts.target.config.nextn[head]

    def _append_input(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> Slice:
        """What the layer begins with: the product of embedding and hidden state side by side, for
        each stream if there are several."""
        own, of = self.parts.own, self._head(head)
        work, weights, x = own.work, own.weights, own.work[STREAM]
        embedded, width = work[EMBEDDED], own.config.hidden
        append_embedded(plan, rows.count, weights.matrix(of.embedding), tokens, embedded)
        if own.config.has_streams:
            widen = Streams("widen", width, rows.count)
            plan.launch(widen, "draft.streams", x=embedded, y=work[WIDENED])
            embedded = work[WIDENED]
            rows = replace(rows, count=STREAMS * rows.count, prompt=STREAMS * rows.prompt)
        sources = [
            (embedded, weights.norm(of.embedding_norm)),
            (hidden, weights.norm(of.hidden_norm)),
        ]
        append_joined(plan, "draft.join", rows.count, width, sources, work[JOINED])
        product = DraftProduct("draft.eh_proj", weights, of.join)
        append_product(plan, own, rows, product, work[JOINED], x)
        return x
