"""Drafts of a draft model, in the steps of its model.

Heads that read hidden states (MTP, EAGLE-3): the row of the token at p has the hidden state of
p - 1. They keep keys and values of a step's rows, from the model's own hidden states, and the
states of the last rows; so a draft begins with one row a sequence. What they kept of drafted
tokens, from hidden states of their own, is overwritten in the step that verifies these.

In steps with neither prompts nor drafts they rest: a ring keeps the model's streams of the last
tokens. Before they draft again, they catch up: keys and values are made from the ring, those of
older tokens as if the streams were zeros (`DraftRest`).

A model by itself rests alike, and catches up by the tokens alone. In a draft it processes the
drafted tokens, except the last one; so a draft begins with two rows a sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    GIVEN,
    PASSED_ON,
    DraftLaunches,
    DraftParts,
    HeadLaunches,
    TokenRows,
)
from urdir.model.engine.speculation.draft_dflash import Block
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.markov_tokens import append_confidence, append_markov_sum
from urdir.model.engine.speculation.source import Pieces
from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import embedding, head
from urdir.model.layers.model import layers
from urdir.model.lower.parts import LayerParts, StepParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.step import lowering
from urdir.model.memory.buckets import row_bucket
from urdir.model.memory.draft_memory import STREAM
from urdir.model.memory.draft_model import BLOCK_ROWS, RING_SLOTS, DraftModel, held_slots
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.speculation.add_draft import AddDraft
from urdir.ptxgen.kernels.speculation.block_rows import BlockRows
from urdir.ptxgen.kernels.speculation.draft_rows import DraftRows
from urdir.ptxgen.kernels.speculation.hidden_before import HiddenBefore
from urdir.ptxgen.kernels.speculation.hold_hidden import HoldHidden
from urdir.ptxgen.kernels.speculation.stream_ring import StreamRing
from urdir.ptxgen.kernels.speculation.top_probability import TopProbability

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import StepShape
    from urdir.model.engine.speculation.draft_dflash import DFlashDraft
    from urdir.model.memory.weights import Weights

#: Buffers of the workspace: hidden states of the positions before, f32, and the places of rows in
#: the draft's cache, u32; the positions of rows that catch up, u32.
BEFORE, PLACES, CAUGHT_UP = "hidden before", "draft places", "caught up"


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft ``model`` with its ``weights``, for the steps of a session. ``launches`` makes what
    reads the model's streams; None: it is a model by itself. ``token_map`` (n,) u32 are the model's
    tokens of its own."""

    model: DraftModel
    weights: Weights
    launches: Callable[[DraftParts], DraftLaunches] | None = None
    token_map: npt.NDArray[np.uint32] | None = None

    def open(
        self,
        parts: StepParts,
        cache: KvCache,
        stream: Stream,
        followers: Sequence[ModelSource] = (),
    ) -> ModelSource:
        """What drafts in the steps of ``parts``, whose ``cache`` has the draft's layers last. What
        is written to it is also written to the ``followers``, those of other ranks."""
        kind: type[ModelSource] = HeadSource if self.model.slots == 1 else BlockSource
        if self.launches is None:
            kind = PlainSource
        elif self.model.shares_cache:
            kind = AssistantSource
        opened = kind(self, parts, cache, stream)
        opened.followers = tuple(followers)
        return opened


class ModelSource(Owner):
    """What `DraftSource` says, by the draft model of ``drafter``; ``own`` are its parts. Its state
    on the device is named as the kernels' parameters are."""

    #: None: it has no cache of its own.
    rest: DraftRest | None = None
    followers: tuple[ModelSource, ...] = ()

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        settings = parts.state.drafts
        assert settings is not None
        device, model = parts.device, drafter.model
        self.model, self.most = model, settings.most
        self.own: LayerParts = replace(
            parts,
            config=model.config,
            weights=drafter.weights,
            cache=cache.after(parts.config.n_layers),
        )
        self._p_min = settings.p_min
        sizes = model.state_sizes(parts.state.sequences, parts.state.rows, settings)
        with ExitStack() as owners:
            self._state = owners.enter_context(device.arena(sizes, "draft state"))
            self._writes = owners.enter_context(QueuedWrites(device, stream))
            for part in self._state.values():
                part.fill(0)
            if drafter.token_map is not None:
                self._state["map"].upload(drafter.token_map)
            for of in self._caches:  # the end of a shared prefix may lack a key
                of.fill(0)
            self._owners = owners.pop_all()

    def begin(self, sequence: int, length: int, p_min: float | None = None) -> None:
        """See `DraftSource`."""
        least = np.array([self._p_min if p_min is None else p_min], np.float32)
        words = {
            "begun": np.array([length], np.uint32),
            "p_min": least.view(np.uint32),
            "ring_at": np.full(RING_SLOTS, IDLE, np.uint32),
        }
        for name, of in words.items():
            for source in (self, *self.followers):
                if name in source._state:
                    source._writes.write(source._state[name], of, of.nbytes * sequence)

    @abstractmethod
    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""

    @abstractmethod
    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`."""

    def answers(self, parts: StepParts, shape: StepShape) -> int:
        """The most sequences that have drafts in a step."""
        return min(row_bucket(max(1, shape.rows - 1)), row_bucket(parts.state.sequences))

    def drafts(self, shape: StepShape) -> int:
        """The most drafts of a sequence in a step."""
        return min(shape.drafts, shape.rows - 1)

    def rows(self, count: int, keys: int, drafts: int = 0) -> Rows:
        """The first ``count`` rows of the draft, of which 1 + ``drafts`` may be of one sequence."""
        places = self._state["draft_sequence"], self._state["draft_position"]
        return Rows(count, keys, 0, *places, drafts=drafts)

    def _append_rows(
        self, plan: Plan, parts: StepParts, shape: StepShape, lag: int, before: bool = False
    ) -> int:
        """Append what places the rows of the draft; returns their number."""
        answers = self.answers(parts, shape)
        sizes = (parts.state.max_len, shape.rows, parts.state.sequences)
        kernel = DraftRows(*sizes, answers=answers, lag=lag, before=before)
        given = {p.name: self._place(parts, p.name) for p in kernel.params}
        plan.launch(kernel, "draft.rows", **given)
        return answers

    def _append_choice(self, plan: Plan, parts: StepParts, rows: int, vocab: int) -> None:
        """Append what makes the token of the highest of ``vocab`` logits of each row the next
        one."""
        slices = self._append_ranks(plan, rows, self.own.work["logits"], vocab)
        self._append_token(plan, parts, rows, slices)

    def _append_ranks(
        self, plan: Plan, rows: int, logits: Slice, vocab: int, judged: bool = True
    ) -> int:
        """Append what finds the highest of ``vocab`` logits of rows, and how likely they are where
        that counts and they are ``judged`` by them; returns the slices of a row."""
        ranks = self.own.work["ranks"]
        argmax = Argmax(n=vocab, rows=rows)
        plan.launch(argmax, "draft.argmax", logits=logits, ranks=ranks)
        if self._p_min and judged:
            found = {"logits": logits, "ranks": ranks, "probability": self._state["probability"]}
            plan.launch(TopProbability(vocab, rows), "draft.probability", **found)
        return argmax.slices

    def _append_token(
        self, plan: Plan, parts: StepParts, rows: int, slices: int, start: int = 0
    ) -> None:
        """Append what adds the tokens of the highest ranks, from row ``start`` of them on."""
        kernel = AddDraft(
            *(slices, parts.state.max_len, parts.config.vocab_size, rows, parts.state.sequences),
            mapped=self.model.mapped,
            start=start,
            moves=not self.model.shares_cache,
            judged=self._p_min > 0,
        )
        own = {
            "ranks": self.own.work["ranks"],
            "sequence": self._state["draft_sequence"],
            "position": self._state["draft_position"],
        }
        given = {p.name: own.get(p.name) or self._place(parts, p.name) for p in kernel.params}
        plan.launch(kernel, "draft.token", **given)

    @property
    def _caches(self) -> list[Slice]:
        """The keys and values of the draft's layers."""
        cache = self.own.cache
        each = (cache.arguments(layer) for layer in cache.shape.layers)
        return [of for given in each for name, of in given.items() if name != "block_table"]

    def _append_fence(self, plan: Plan, caches: Sequence[Slice], to: Slice) -> None:
        """Append copies of a word of ``caches`` to the buffer that the next embedding writes, which
        so comes after all that wrote these caches. Attention reads keys before it waits for the
        launches before it, and no other launch before it waits for those."""
        for of in caches:
            plan.copy(to.slice(0, 4), of.slice(0, 4), "draft.fence")

    def _append_rested(
        self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows
    ) -> Rows | None:
        """The rows of a step of which a draft that reads streams keeps something; None where it
        rests: the ring keeps their streams. Those that catch up have them from there."""
        if shape.drafts or (shape.prompt and not shape.draft_only):
            return rows
        model, state = self.model, parts.state
        sizes = (model.stream, state.max_len, RING_SLOTS, rows.count, state.sequences)
        kernel = StreamRing(*sizes, streams=len(model.streams), takes=shape.draft_only)
        place = self.own.work[CAUGHT_UP]
        given = {"known": state["known"], "place": place, **self._state, **rows.arguments}
        given |= {f"x{i}": parts.work[name] for i, name in enumerate(model.streams)}
        plan.launch(kernel, "draft.ring", **{p.name: given[p.name] for p in kernel.params})
        return replace(rows, position=place) if shape.draft_only else None

    def _place(self, parts: StepParts, name: str) -> Slice:
        return self._state[name] if name in self._state else parts.state[name]

    def _launches(self, drafter: Drafter, parts: StepParts) -> DraftLaunches:
        """What reads the model's streams."""
        assert drafter.launches is not None
        for name in drafter.model.widths:  # rows of padding are read, but not written
            self.own.work[name].fill(0)
        return drafter.launches(self.draft_parts(parts))

    def draft_parts(self, parts: StepParts) -> DraftParts:
        """What launches that read the model's streams read and write."""
        position = self._state["draft_position"]
        return DraftParts(
            target=parts, own=self.own, tokens=self.model.tokens, token_position=position
        )

    def close(self) -> None:
        """Free the draft's state. Idempotent."""
        self._owners.close()


class HeadSource(ModelSource):
    """Heads that read the model's hidden states, and draft one token after the other."""

    #: The part of the state with the last positions that rows of drafts attend to.
    _seen = "draft_position"

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self._heads = cast("HeadLaunches", self._launches(drafter, parts))
        self.rest = DraftRest()

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""
        heads, work, state = self._heads, self.own.work, self._state
        answers = self._append_rows(plan, parts, shape, heads.lag)
        self._append_before(plan, parts, answers)
        rows = replace(self.rows(answers, shape.keys), position=state[self._seen])
        at = state["draft_sequence"], state["token_position"]
        tokens = TokenRows(parts.state["tokens"], parts.state.sequences, parts.state.max_len, *at)
        for step in range(self.drafts(shape)):
            hidden, number = work[PASSED_ON if step else GIVEN], step if heads.heads > 1 else 0
            for later in range(number + 1, heads.heads):
                heads.append_keys(plan, rows, later, tokens, hidden)
            if number + 1 < heads.heads:
                self._append_fence(plan, self._caches, work[EMBEDDED])
            heads.append_head(plan, rows, number, tokens, hidden)
            self._append_choice(plan, parts, answers, self.draft_parts(parts).vocabulary(answers))
            yield

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: keys and values of all rows, and the hidden states of the last."""
        heads, work, state = self._heads, self.own.work, parts.state
        if (of := self._append_rested(plan, parts, shape, rows)) is None:
            return
        rows = of
        heads.append_given(plan, rows)
        plan.launch(
            HiddenBefore(*self._held_sizes(parts, rows.count), lag=heads.lag),
            "draft.before",
            x=work[GIVEN],
            held=self._state["held"],
            begun=self._state["begun"],
            place=work[PLACES],
            y=work[BEFORE],
            **rows.arguments,
        )
        kept = replace(rows, position=work[PLACES], begins=False, walk=None)
        at = rows.sequence, rows.position
        tokens = TokenRows(state["tokens"], state.sequences, state.max_len, *at)
        for number in range(heads.heads):
            heads.append_keys(plan, kept, number, tokens, work[BEFORE])
        self._append_held(plan, parts, rows)
        if shape.steps > 1:
            self._append_fence(plan, self._caches, work[EMBEDDED])
        yield

    def _held_sizes(self, parts: StepParts, rows: int) -> tuple[int, int, int, int, int]:
        """Sizes of kernels for hidden states of the last positions."""
        held, slots = self.model.held, held_slots(self.most)
        return held, parts.state.max_len, slots, rows, parts.state.sequences

    def _append_held(self, plan: Plan, parts: StepParts, rows: Rows) -> None:
        """Append what keeps the given hidden states of the last rows."""
        kernel, held = HoldHidden(*self._held_sizes(parts, rows.count)), self._state["held"]
        plan.launch(kernel, "draft.held", x=self.own.work[GIVEN], held=held, **rows.arguments)

    def _append_before(self, plan: Plan, parts: StepParts, answers: int) -> None:
        """Append what makes the hidden states before the pending tokens the given ones."""
        own = self._state
        plan.launch(
            HiddenBefore(*self._held_sizes(parts, answers), lag=self._heads.lag, alone=True),
            "draft.given",
            sequence=own["draft_sequence"],
            position=own["token_position"],
            held=own["held"],
            begun=own["begun"],
            place=own[self._seen],
            y=self.own.work[GIVEN],
        )


class AssistantSource(HeadSource):
    """A draft that reads the model's cache. All drafts of a sequence attend to the tokens before
    its pending one, with queries at the position of that: only the places of tokens move on. Of
    other steps hidden states are kept."""

    _seen = "seen_position"

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self.rest = None

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: the hidden states of the last rows."""
        self._heads.append_given(plan, rows)
        self._append_held(plan, parts, rows)
        yield

    def _append_rows(
        self, plan: Plan, parts: StepParts, shape: StepShape, lag: int, before: bool = False
    ) -> int:
        return super()._append_rows(plan, parts, shape, 0)

    @property
    def _caches(self) -> list[Slice]:
        return []


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
        if draft.markov is not None:
            self._append_markov(plan, parts, self.rows(answers, shape.keys), range(first, slots))
            yield
            return
        vocab = self.own.config.vocab_size
        slices = self._append_ranks(plan, count, self.own.work["logits"], vocab)
        for slot in range(first, slots):
            self._append_token(plan, parts, answers, slices, slot * answers)
        yield

    def _append_markov(self, plan: Plan, parts: StepParts, rows: Rows, slots: range) -> None:
        """Append what chooses the tokens of ``slots`` one after the other."""
        markov, state, own = self._block.draft.markov, self._state, self.own
        assert markov is not None
        at = state["draft_sequence"], state["token_position"]
        tokens = TokenRows(parts.state["tokens"], parts.state.sequences, parts.state.max_len, *at)
        for slot in slots:
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


class PlainSource(ModelSource):
    """A model by itself with the same tokens."""

    def __init__(self, drafter: Drafter, parts: StepParts, cache: KvCache, stream: Stream) -> None:
        super().__init__(drafter, parts, cache, stream)
        self.rest = DraftRest(of_tokens=True)

    def append(self, plan: Plan, parts: StepParts, shape: StepShape) -> Pieces:
        """See `DraftSource`."""
        answers = self._append_rows(plan, parts, shape, lag=0, before=True)
        for number in range(self.drafts(shape)):
            if not number:  # with the tokens before: the last draft may have been accepted
                rows = self.rows(2 * answers, shape.keys, drafts=1)
            else:
                rows = self.rows(answers, shape.keys)
            step = StepOps(self.own.config, rows.count)
            x = layers(step, embedding(step))
            assert x is not None
            head(step, x)
            yield from lowering(plan, self.own, rows, step.graph)
            self._append_choice(plan, parts, answers, self.own.config.vocab_size)

    def append_kept(self, plan: Plan, parts: StepParts, shape: StepShape, rows: Rows) -> Pieces:
        """See `DraftSource`: the rows of steps with prompts."""
        if not shape.prompt:
            return
        step = StepOps(self.own.config, rows.count)
        layers(step, embedding(step), rows.count, wanted=False)
        kept = replace(rows, begins=False, walk=None)
        yield from lowering(plan, self.own, kept, step.graph)


def service_widths(hidden: int) -> dict[str, int]:
    """Values a row of the intermediates of drafts that read streams, beside those of their
    launches."""
    return {BEFORE: hidden, PLACES: 1, CAUGHT_UP: 1}
