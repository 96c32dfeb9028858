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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.engine.speculation.draft import DraftLaunches, DraftParts
from urdir.model.engine.speculation.draft_rest import DraftRest
from urdir.model.engine.speculation.source import Pieces
from urdir.model.lower.parts import LayerParts, StepParts
from urdir.model.lower.rows import Rows
from urdir.model.memory.buckets import row_bucket
from urdir.model.memory.draft_model import RING_SLOTS, DraftModel
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.argmax import Argmax
from urdir.ptxgen.kernels.speculation.add_draft import AddDraft
from urdir.ptxgen.kernels.speculation.draft_rows import DraftRows
from urdir.ptxgen.kernels.speculation.stream_ring import StreamRing
from urdir.ptxgen.kernels.speculation.top_probability import TopProbability

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Stream
    from urdir.model.engine.batch import StepShape
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

    def _launches(
        self, drafter: Drafter, parts: StepParts, *, narrow: bool = False
    ) -> DraftLaunches:
        """What reads the model's streams."""
        assert drafter.launches is not None
        of = drafter.model
        for name in (*of.widths, *of.of_drafts):  # rows of padding are read, but not written
            self.own.work[name].fill(0)
        return drafter.launches(self.draft_parts(parts, narrow))

    def draft_parts(self, parts: StepParts, narrow: bool = False) -> DraftParts:
        """What launches that read the model's streams read and write; ``narrow``: some tokens alone
        are drafted."""
        position, tokens = self._state["draft_position"], self.model.tokens if narrow else 0
        return DraftParts(target=parts, own=self.own, tokens=tokens, token_position=position)

    def close(self) -> None:
        """Free the draft's state. Idempotent."""
        self._owners.close()


def service_widths(hidden: int) -> dict[str, int]:
    """Values a row of the intermediates of drafts that read streams, beside those of their
    launches."""
    return {BEFORE: hidden, PLACES: 1, CAUGHT_UP: 1}
