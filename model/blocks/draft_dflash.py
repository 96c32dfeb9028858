"""DFlash drafts (`families.dflash`) as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.attention import LayerAttention, append_tokens
from urdir.model.blocks.attention_network import (
    append_keys,
    layer_attention,
    own_token,
    products_of,
)
from urdir.model.blocks.draft import (
    EMBEDDED,
    GIVEN,
    DraftParts,
    TokenRows,
    append_embedded,
    append_logits,
)
from urdir.model.blocks.draft_streams import append_given_streams
from urdir.model.blocks.feed_forward import append_dense
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.dflash import DFlash

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.blocks.rows import Rows
    from urdir.model.families.attention import Attention
    from urdir.model.memory.weights import Matrix


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
    """The draft that ``parts.own`` describes. It keeps keys and values of what the model gives, of
    whatever tokens."""

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
        norm, made = own.weights.norm(draft.given_norm), Activations(own.work[EMBEDDED])
        own.linear(plan, rows).append_norm("draft.given", draft.hidden, made, norm, own.work[GIVEN])

    def append_keys(
        self, plan: Plan, rows: Rows, head: int, tokens: TokenRows, hidden: Slice
    ) -> None:
        """Keys and values of hidden states in all layers."""
        for index in range(self.draft.n_layers):
            at = LayerStep(plan, self.parts.own, rows, index)
            append_keys(at, self.draft.mixer(index)[0], Activations(hidden), None)

    def append_block(self, plan: Plan, rows: Rows, tokens: TokenRows, block: Block) -> None:
        """The logits of the rows of blocks, in the draft's workspace."""
        own, draft = self.parts.own, self.draft
        target, weights = self.parts.target, own.weights
        table = target.weights.matrix(target.config.embedding)
        if not draft.shares_embedding:
            table = weights.matrix(draft.embedding)
        append_embedded(plan, rows.count, table, tokens, own.work["hidden"])
        x = Activations(own.work["hidden"])
        for index in range(draft.n_layers):
            at = LayerStep(plan, own, rows, index)
            x = self._append_layer(at, x, block)
        assert draft.output_norm is not None
        norm = weights.norm(draft.output_norm)
        append_logits(plan, self.parts, rows, self._output, at.linear.complete(x), norm)

    def _append_layer(self, at: LayerStep, x: Activations, block: Block) -> Activations:
        mixer, before = self.draft.mixer(at.index)
        network, ffn_norm = self.draft.network(at.index)
        norm = at.norm(ffn_norm)
        at.linear.append(at.name("attn_qkv"), products_of(at, mixer), x, at.norm(before))
        self._append_attention(at, mixer, block)
        to, heads = Destination(at.free(x.x), x.x, norm), Activations(at.work["heads"])
        x = at.finish("attn_output", at.matrix(mixer.o), heads, to)
        return append_dense(at, network, x, norm, Destination(at.free(x.x), x.x, None))

    def _append_attention(self, at: LayerStep, mixer: Attention, block: Block) -> None:
        """Each row attends to what is kept and to the block. A window is measured from the end of
        what a row sees, so that each slot has one of its own where that is not its own place."""
        all_rows = layer_attention(at, mixer, own_token(mixer))
        append_tokens(at.plan, all_rows)
        heads, seen = at.work["heads"], replace(at.rows, position=block.ends)
        if self.draft.causal or not mixer.window:
            _attend(at, replace(all_rows, rows=seen), heads)
            return
        for slot, start in enumerate(range(0, at.rows.count, block.sequences)):
            rows = replace(seen, count=min(block.sequences, at.rows.count - start))
            wider = replace(mixer, window=mixer.window + max(0, block.slots - 1 - slot))
            label, width = f"{all_rows.label}.{slot}", 4 * mixer.output_width
            of_slot = replace(all_rows.of_rows(start, rows), scores=wider.scores, label=label)
            _attend(at, of_slot, heads.slice(start * width, rows.count * width))

    @property
    def _output(self) -> Matrix:
        target = self.parts.target
        if self.draft.shares_output:
            return target.weights.matrix(target.config.output.matrix)
        return self.parts.own.weights.matrix(self.draft.output)


def _attend(at: LayerStep, attention: LayerAttention, out: Slice) -> None:
    """Heads of rows whose keys are in the cache."""
    attention.launch(at.plan, attention.decode_kernel(None), attention.label, out=out)
