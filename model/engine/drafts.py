"""A draft beside a session: its steps, by plans that are run launch by launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import numpy.typing as npt

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.draft import (
    GIVEN,
    DraftChain,
    DraftLaunches,
    DraftParts,
    TokenRows,
)
from urdir.model.errors import ModelError
from urdir.model.lower.paper import Needs, PaperWorkspace, needs_of
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.buckets import chunks_of, row_bucket
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.draft_memory import DraftRows, DraftRowsShape, draft_workspace
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.execute import BoundPlan
    from urdir.model.families.config import Config
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weights import Weights


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a draft with layers as ``config`` describes takes on a device beside its weights, for
    sessions of ``settings``; ``widths`` as `draft_workspace` has them, zeros at first.
    ``most`` tokens at most are drafted at once, of a block by as many ``slots``, else one after the
    other. Its layers read the cache of ``source``, the model, if one is given, and have none."""

    config: Config
    settings: SessionSettings
    widths: Mapping[str, int]
    most: int
    slots: int = 1
    source: Config | None = None

    @property
    def chunk(self) -> int:
        """The most rows of a prompt in a step."""
        settings = self.settings
        return chunks_of(settings.exact, min(settings.chunk, settings.context))[-1]

    @property
    def rows(self) -> DraftRowsShape:
        """The rows of a step."""
        rows = row_bucket(self.settings.sequences)
        return DraftRowsShape(rows, rows + self.chunk, self.most + 1)

    @property
    def block_rows(self) -> int:
        """The rows of a step that drafts."""
        return row_bucket(self.rows.rows * self.slots)

    @property
    def cache(self) -> CacheShape:
        """The cache of keys and values that its layers read."""
        rows = max(self.chunk, 2 * (self.most + 1))
        if self.source is None:
            return CacheShape.of(self.config, self.settings, rows)
        shape = CacheShape.of(self.source, self.settings, rows)
        sources = [mixer.shares_cache_of for mixer in self.config.attentions]
        owners = tuple(shape.owners[layer] for layer in sources if layer is not None)
        return replace(shape, owners=owners)

    def workspace(self, sm_count: int) -> WorkspaceShape:
        """What outlives a launch of a step; there is no room for its values yet."""
        return draft_workspace(
            self.config,
            self.cache,
            self.block_rows,
            self.chunk,
            sm_count,
            exact=self.settings.exact,
            widths=self.widths,
        )

    def nbytes(self, device: Device) -> int:
        """Bytes on a device, without room for the values of a step."""
        own = {} if self.source else self.cache.sizes()
        sizes = sum((own | self.rows.sizes()).values())
        return sizes + self.workspace(device.properties.sm_count).nbytes


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a plan is for: what the target has "given", the "keys" of a head, a "head" as a whole,
    "drafts" one after the other, or a "block". It has ``rows`` rows, of a ``prompt`` or not, that
    attend to ``keys`` keys, and as many ``drafts``."""

    kind: Literal["given", "keys", "head", "drafts", "block"]
    rows: int
    keys: int = 0
    head: int = 0
    drafts: int = 0
    prompt: bool = False


class Draft(Owner):
    """A draft of ``session``'s model, with a cache of its own; all is queued on its stream.

    ``weights`` are the draft's. ``launches`` are what it is made of, for what it reads and writes;
    ``token_map`` (n,) u32 the model's token of each of the draft's, where it has its own. A row is
    (sequence, its token's position); tokens are those of the session's state.
    """

    launches: DraftLaunches

    def __init__(
        self,
        session: Session,
        shape: DraftShape,
        weights: Weights,
        launches: Callable[[DraftParts], DraftLaunches],
        token_map: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        target = session.parts
        device, stream = target.device, session.stream
        self.session, self.shape = session, shape
        self._bound: dict[DraftStep, BoundPlan] = {}
        with ExitStack() as owners:
            self.cache: KvCache | None = None
            if shape.source is None:
                self.cache = owners.enter_context(KvCache(device, shape.cache, stream))
            kept = shape.workspace(device.properties.sm_count)
            self.rows = owners.enter_context(DraftRows(device, shape.rows, stream))
            own = LayerParts(
                device=device,
                config=shape.config,
                weights=weights,
                cache=self.cache or target.cache,
                work=cast("Workspace", PaperWorkspace(kept)),
                exact=target.exact,
            )
            places = None
            if token_map is not None:
                nbytes = token_map.nbytes
                held = owners.enter_context(device.allocate(nbytes, "draft tokens"))
                held.upload(token_map)
                places = held.slice(0, nbytes)
            at = self.rows["token_position"]
            self.parts = DraftParts(target=target, own=own, token_map=places, token_position=at)
            self.launches = launches(self.parts)
            sized = self._with_room(kept)
            work = owners.enter_context(Workspace(device, sized, "draft workspace"))
            for name in shape.widths:
                work[name].fill(0)
            self.parts = replace(self.parts, own=replace(own, work=work))
            self.launches = launches(self.parts)
            self._owners = owners.pop_all()

    def _with_room(self, kept: WorkspaceShape) -> WorkspaceShape:
        """The workspace with room for the values of the largest steps, which are lowered for it
        while ``parts`` has one of paper."""
        needs = Needs()
        for step in self._largest_steps():
            sheet = Sheet(self.parts.own.work)
            self.append(cast("Plan", sheet), step)
            needs = needs.most(needs_of(sheet))
        needs = needs.for_rows(max(self.shape.rows.rows, self.shape.chunk))
        return replace(kept, zeroed={**kept.zeroed, **needs.zeroed}, room=needs.room)

    def _largest_steps(self) -> Iterator[DraftStep]:
        """Steps whose values need the most room."""
        keys, rows = self.shape.cache.max_len, self.shape.rows.rows
        yield DraftStep("given", rows)
        for count in dict.fromkeys((1, rows, self.shape.chunk)):
            prompt = count == self.shape.chunk > 1
            for head in range(self.launches.heads):
                yield DraftStep("keys", count, keys, head, prompt=prompt)

    # ---- hidden states that the target gives ----

    def begin(self, sequence: int = 0) -> None:
        """Forget a sequence; what is given next is the hidden state before its first token."""
        if self.cache is not None:
            self.cache.truncate(sequence, 0)
        self.parts.own.work[GIVEN].fill(0, self.session.stream)

    def take(self, rows: int = 1) -> None:
        """Copy the hidden states of the first rows of the target's last step."""
        self._run(DraftStep("given", rows))

    # ---- tokens that are known ----

    def keep(self, sequence: int, start: int, end: int) -> None:
        """Process the tokens from ``start`` to ``end`` with as many hidden states that are given,
        for keys and values alone, in all heads."""
        if (tokens := end - start) > (most := self.shape.chunk):
            raise ModelError(f"{tokens} tokens at once: a step has room for {most}")
        count = next(c for c in (1, *chunks_of(self.parts.own.exact)) if c >= tokens)
        rows = [(sequence, position) for position in range(start, end)]
        at = self._write(rows, count, prompt=count > 1)
        for head in range(self.launches.heads):
            keys = self.session.shapes.keys(at)
            self._run(DraftStep("keys", count, keys, head, prompt=count > 1))

    # ---- tokens that are drafted ----

    @abstractmethod
    def propose(self, lasts: Sequence[tuple[int, int, int]], count: int) -> list[list[int]]:
        """Draft ``count`` tokens after each of the ``lasts``: (sequence, position, token), each
        with the hidden state that is given in its row. What the draft keeps of these positions is
        overwritten when they are processed again."""

    def read_drafts(self, rows: int, count: int) -> list[list[int]]:
        """The ``count`` tokens that are drafted in each of the first rows."""
        shape = self.shape.rows
        drafts = self.rows["drafts"].download(np.uint32, (shape.rows, shape.columns))
        return [row[1 : 1 + count].tolist() for row in drafts[:rows]]

    @property
    def chain(self) -> DraftChain:
        """Where drafts are."""
        rows = self.rows
        places = rows["drafts"], rows["numbers"], rows["columns"]
        return DraftChain(*places, self.shape.rows.columns, self.shape.rows.stride)

    # ---- plans ----

    def _write(
        self, rows: Sequence[tuple[int, int]], count: int, *, prompt: bool, more: int = 0
    ) -> int:
        """Write rows, with room in the cache; returns how long the longest sequence is then."""
        lag, cache = self.launches.lag, self.cache
        for sequence in {sequence for sequence, _ in rows}:
            places = [position - lag for s, position in rows if s == sequence]
            if cache is not None:
                cache.reserve(sequence, min(places), max(places) + 1 + more)
        written = [(sequence, position - lag, position) for sequence, position in rows]
        self.rows.write(written, count, prompt=prompt)
        return max(position - lag for _, position in rows) + 1 + more

    def _run(self, step: DraftStep) -> None:
        device = self.parts.own.device
        if step not in self._bound:
            self._bound[step] = execute.bind(self.plan(step), device)
        execute.run(self._bound[step], device, self.session.stream)

    def plan(self, step: DraftStep) -> Plan:
        """The launches of a step."""
        plan = Plan(f"draft {step.kind}")
        self.append(plan, step)
        plan.add_transfers()
        return plan

    def append(self, plan: Plan, step: DraftStep) -> None:
        """Append the launches of a step."""
        rows = self._rows(step)
        if step.kind == "given":
            self.launches.append_given(plan, rows)
        else:
            given = self.parts.own.work[GIVEN]
            self.launches.append_keys(plan, rows, step.head, self._tokens, given)

    @property
    def _tokens(self) -> TokenRows:
        state, rows = self.parts.target.state, self.rows
        places = rows["sequence"], rows["token_position"]
        return TokenRows(state["tokens"], state.sequences, state.max_len, *places)

    def _rows(self, step: DraftStep) -> Rows:
        places = self.rows["sequence"], self.rows["position"]
        rows = Rows(step.rows, step.keys, 0, *places)
        if not step.prompt:
            return rows
        return replace(rows, prompt=step.rows, segments=1, segment=self.rows["segment"])

    def close(self) -> None:
        """Free what the draft has. Idempotent."""
        self._owners.close()
