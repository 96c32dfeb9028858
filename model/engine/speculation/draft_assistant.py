"""Gemma 4's assistant (`families.gemma4_assistant`) as launches appended to a plan."""

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
from urdir.model.families.gemma4_assistant import Gemma4Assistant
from urdir.model.families.tapped import tap
from urdir.model.graph.attention import Attend
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import ScaleBy
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import attend_op, head_products, prepared_heads
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.dense import dense
from urdir.model.lower.attend import append_tokens
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import Prepared, layer_attention
from urdir.model.lower.sheet import Sheet, sheet_of
from urdir.model.lower.step import lower
from urdir.model.memory.draft_memory import STREAM
from urdir.model.memory.workspace import saved

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.attention import Attention
    from urdir.model.lower.rows import Rows


@dataclass(frozen=True, slots=True)
class AssistantDraft:
    """The draft that ``parts.own`` describes. It keeps nothing: it reads the model's cache. A row's
    position is that of the last token that it sees; queries are rotated by their token's."""

    parts: DraftParts
    heads: int = 1
    lag: int = 1
    moves: bool = False

    @property
    def draft(self) -> Gemma4Assistant:
        """Its description."""
        config = self.parts.own.config
        assert isinstance(config, Gemma4Assistant)
        return config

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The model's stream after its layers, normalised."""
        own, target = self.parts.own, self.parts.target
        config = target.config
        assert config.output_norm is not None
        norm, stream = target.weights.norm(config.output_norm), saved(tap(config.n_layers))
        vectors = (target.work[stream], own.work[GIVEN], config.hidden)
        append_norm(plan, rows.count, "draft.given", norm, vectors)

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Nothing."""

    def append_head(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Logits, and the projection of the last state, as it is passed on."""
        own, draft, target = self.parts.own, self.draft, self.parts.target
        work, table = own.work, target.weights.matrix(target.config.embedding)
        scale = target.config.embedding_scale
        append_embedded(plan, rows.count, table, tokens, work[EMBEDDED], scale)
        sources = [(work[EMBEDDED], None), (hidden, None)]
        append_joined(plan, "draft.join", rows.count, draft.target_hidden, sources, work[JOINED])
        before = DraftProduct("draft.pre_projection", own.weights, draft.fc)
        x = work[STREAM]
        append_product(plan, own, rows, before, work[JOINED], x)
        for index in range(draft.n_layers):
            self._append_layer(plan, rows, index, x)
        after = DraftProduct("draft.post_projection", own.weights, draft.passed)
        append_product(plan, own, rows, after, x, work[PASSED_ON], draft.output_norm)
        output = DraftProduct("draft.output", own.weights, draft.output)
        append_logits(plan, self.parts, rows, output, x, draft.output_norm)

    def _append_layer(self, plan: Plan, rows: Rows, index: int, x: Slice) -> None:
        """x = the stream after a layer, of the stream x before it."""
        own, draft = self.parts.own, self.draft
        (mixer, attends), (network, block) = draft.mixer(index), draft.network(index)
        step = StepOps(own.config, rows.count)
        stream, at = step.graph.input(step.stream()), LayerOps(step, index)
        normed = at.norm("attn_norm", stream, attends.branches[0].norm)
        queries = head_products(at, mixer, normed)["q"]
        with sheet_of(plan, own) as sheet:
            lower(sheet, own, rows, step.graph, fixed={stream: x})
            self._append_attention(sheet, rows, at, mixer, queries)
            step = StepOps(own.config, rows.count)
            stream, at = step.graph.input(step.stream()), LayerOps(step, index)
            heads = step.graph.input(Tensor("heads", rows.count, mixer.output_width))
            made = at.finish("attn_output", heads, mixer.o)
            total = at.add("sum", stream, at.norm("post_attention_norm", made, attends.post_norm))
            read = at.norm("ffn_norm", total, block.branches[0].norm)
            made = at.norm("post_ffw_norm", dense(at, network, read, 1.0), block.post_norm)
            total = at.add("sum", total, made)
            fixed = {stream: x, total: x}
            if (scale := draft.layers[index].output_scale) is not None:  # in place
                scaled = ScaleBy(at.name("layer_output_scale"), step.stream(), total, scale)
                fixed[at.graph.add(scaled)] = x
            lower(sheet, own, rows, step.graph, fixed=fixed)

    def _append_attention(
        self, plan: Sheet, rows: Rows, ops: LayerOps, mixer: Attention, queries: Tensor
    ) -> None:
        """Queries, rotated by the position of their token, attend to earlier keys of the model.
        A window is measured from the token, which is not among the keys."""
        source, first = mixer.shares_cache_of, len(ops.graph)
        assert source is not None
        assert self.parts.token_position is not None
        ((_, turned),) = prepared_heads(ops, mixer, queries, None)
        attend = attend_op(ops, Attend, "heads", mixer, turned, None, None)
        ops.graph.add(attend)
        prepared = Prepared.of(ops.graph.ops[first:])
        assert prepared is not None
        assert prepared.token is not None
        parts = replace(self.parts.own, cache=self.parts.target.cache)
        at = Lowering(plan, parts, rows, Graph())
        of_source = replace(prepared.attend, layer=source)
        layer = layer_attention(at, of_source, prepared.token, prepared.constants(at))
        of_tokens = replace(rows, position=self.parts.token_position)
        append_tokens(plan, replace(layer, rows=of_tokens))
        if mixer.window:
            layer = replace(layer, scores=replace(mixer, window=mixer.window - 1).scores)
        layer.launch(plan, layer.decode_kernel(None), layer.label, out=at.work["heads"])
