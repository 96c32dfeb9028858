"""DFlash drafts (`families.dflash`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    GIVEN,
    DraftParts,
    TokenRows,
    append_embedded,
    append_logits,
    append_norm,
)
from urdir.model.engine.speculation.draft_convolutions import (
    DYNAMIC,
    convolved_after,
    convolved_before,
)
from urdir.model.engine.speculation.draft_streams import append_given_streams
from urdir.model.engine.speculation.selected_tokens import append_candidates
from urdir.model.families.dflash import DFlash
from urdir.model.graph.attention import Attend
from urdir.model.graph.graph import Graph
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import attend_op, cached_keys, head_products, prepared_heads
from urdir.model.layers.builder import LayerOps, StepOps
from urdir.model.layers.dense import dense
from urdir.model.lower.attend import LayerAttention, append_tokens
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import Prepared, layer_attention
from urdir.model.lower.sheet import Sheet, sheet_of
from urdir.model.lower.step import lower
from urdir.model.memory.draft_memory import OTHER_STREAM, STREAM

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.families.attention import Attention
    from urdir.model.lower.rows import Rows


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of blocks of ``slots`` rows of ``sequences`` sequences, those of a slot side by side.
    They attend to positions up to ``ends`` (rows,) u32; where a draft is not causal, those are the
    same in every slot."""

    slots: int
    sequences: int
    ends: Slice


@dataclass(frozen=True, slots=True)
class DFlashDraft:
    """The draft that ``parts.own`` describes. It keeps keys and values of the model's streams at
    every token."""

    parts: DraftParts
    heads: int = 1
    lag: int = 1

    @property
    def draft(self) -> DFlash:
        """Its description."""
        config = self.parts.own.config
        assert isinstance(config, DFlash)
        return config

    def append_given(self, plan: Plan, rows: Rows) -> None:
        """The norm of the product of the model's streams side by side."""
        own, draft = self.parts.own, self.draft
        append_given_streams(plan, self.parts, draft, rows, own.work[EMBEDDED])
        norm, work = own.weights.norm(draft.given_norm), own.work
        vectors = (work[EMBEDDED], work[GIVEN], draft.hidden)
        append_norm(plan, rows.count, "draft.given", norm, vectors)

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of hidden states in all layers."""
        own = self.parts.own
        for index in range(self.draft.n_layers):
            step = StepOps(own.config, rows.count)
            x = step.graph.input(step.stream())
            cached_keys(LayerOps(step, index), self.draft.mixer(index)[0], x)
            lower(plan, own, rows, step.graph, fixed={x: hidden})

    def append_block(self, plan: Plan, rows: Rows, tokens: TokenRows, block: Block) -> None:
        """The logits of the rows of blocks, in the draft's workspace, and the candidates of a
        selector."""
        own, draft = self.parts.own, self.draft
        target, weights = self.parts.target, own.weights
        table = target.weights.matrix(target.config.embedding)
        if not draft.shares_embedding:
            table = weights.matrix(draft.embedding)
        append_embedded(plan, rows.count, table, tokens, own.work[STREAM])
        x, other = own.work[STREAM], own.work[OTHER_STREAM]
        for index in range(draft.n_layers):
            self._append_layer(plan, rows, index, x, other, block)
            x, other = other, x
        assert draft.output_norm is not None
        append_logits(plan, self.parts, rows, self.parts.output, x, draft.output_norm)
        if draft.selector is not None:
            append_candidates(plan, own, rows, draft.selector, x)

    def _append_layer(
        self, plan: Plan, rows: Rows, index: int, x: Slice, y: Slice, block: Block
    ) -> None:
        """y = the stream after a layer, of the stream x before it."""
        own, (mixer, before) = self.parts.own, self.draft.mixer(index)
        network, ffn_norm = self.draft.network(index)
        around, around_ffn = self.draft.around(index)
        stride, fixed = block.sequences, {}
        step = StepOps(own.config, rows.count)
        stream, at = step.graph.input(step.stream()), LayerOps(step, index)
        normed = at.norm("attn_norm", stream, before)
        normed, dynamic = convolved_before(at, "attn", around, normed, stride)
        if dynamic is not None:
            fixed[dynamic] = own.work[DYNAMIC]
        heads = head_products(at, mixer, normed)
        with sheet_of(plan, own) as sheet:
            lower(sheet, own, rows, step.graph, fixed={stream: x, **fixed})
            self._append_attention(sheet, rows, self._prepared(at, mixer, heads), mixer, block)
            step = StepOps(own.config, rows.count)
            stream, at = step.graph.input(step.stream()), LayerOps(step, index)
            attended = step.graph.input(Tensor("heads", rows.count, mixer.output_width))
            made = at.finish("attn_output", attended, mixer.o)
            if dynamic is not None:
                dynamic = step.graph.input(dynamic)
            made = convolved_after(at, "attn", around, made, dynamic, stride)
            total = at.add("sum", stream, made)
            normed = at.norm("ffn_norm", total, ffn_norm)
            normed, of_ffn = convolved_before(at, "ffn", around_ffn, normed, stride)
            made = dense(at, network, normed, 1.0)
            made = convolved_after(at, "ffn", around_ffn, made, of_ffn, stride)
            total = at.add("sum", total, made)
            lower(sheet, own, rows, step.graph, fixed={stream: x, total: y, **fixed})

    def _prepared(self, at: LayerOps, mixer: Attention, made: dict[str, Tensor]) -> Prepared:
        """The attention of queries, keys and values, with what comes before it."""
        first = len(at.graph)
        made |= dict(prepared_heads(at, mixer, made["q"], made.get("k")))
        at.graph.add(attend_op(at, Attend, "heads", mixer, made["q"], made.get("k"), made.get("v")))
        prepared = Prepared.of(at.graph.ops[first:])
        assert prepared is not None
        return prepared

    def _append_attention(
        self, plan: Sheet, rows: Rows, prepared: Prepared, mixer: Attention, block: Block
    ) -> None:
        """Each row attends to what is kept and to the block. A window is measured from the end of
        what a row sees, so that each slot has one of its own where that is not its own place."""
        at, token = Lowering(plan, self.parts.own, rows, Graph()), prepared.token
        assert token is not None
        all_rows = layer_attention(at, prepared.attend, token, prepared.constants(at))
        append_tokens(plan, all_rows)
        heads, seen = at.work["heads"], replace(rows, position=block.ends)
        if self.draft.causal or not mixer.window:
            _attend(plan, replace(all_rows, rows=seen), heads)
            return
        for slot, start in enumerate(range(0, rows.count, block.sequences)):
            some = replace(seen, count=min(block.sequences, rows.count - start))
            wider = replace(mixer, window=mixer.window + max(0, block.slots - 1 - slot))
            label, width = f"{all_rows.label}.{slot}", 4 * mixer.output_width
            of_slot = replace(all_rows.of_rows(start, some), scores=wider.scores, label=label)
            _attend(plan, of_slot, heads.slice(start * width, some.count * width))

    @property
    def last_state(self) -> Slice:
        """The stream after the last layer of the rows of blocks, before the output's norm."""
        return self.parts.own.work[OTHER_STREAM if self.draft.n_layers % 2 else STREAM]


def _attend(plan: Sheet, attention: LayerAttention, out: Slice) -> None:
    """Heads of rows whose keys are in the cache."""
    attention.launch(plan, attention.decode_kernel(None), attention.label, out=out)
