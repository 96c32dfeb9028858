"""The encoder of an encoder-decoder: sources become the keys and values of cross attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

from urdir.driver.plan import Plan
from urdir.model.engine.text_graphs import TextGraphs
from urdir.model.engine.text_steps import (
    LARGEST_STEP,
    EncodeShape,
    kinds_of,
    row_bucket,
    rows_of,
    text_bucket,
)
from urdir.model.errors import SettingsError
from urdir.model.families.config import Config
from urdir.model.families.description import fields_of
from urdir.model.layers.builder import StepOps
from urdir.model.layers.pooled import encoded
from urdir.model.layers.source import STATES, source_keys, source_states
from urdir.model.lower.paper import Needs, PaperDevice, PaperTextRows, PaperWorkspace, needs_of
from urdir.model.lower.rows import Rows
from urdir.model.lower.sheet import Sheet
from urdir.model.lower.step import lower
from urdir.model.memory.text_rows import TextKeys, TextRows, TextRowsShape
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Stream
    from urdir.model.engine.runner import Observer
    from urdir.model.lower.parts import StepParts
    from urdir.ptxgen.kernels.attention.kv_types import KvDtype

#: Rows of a step at least, for several sources at once.
_ROWS = 1024
#: What recorded graphs may take: about 0.8 MB each of an encoder of 24 layers.
_GRAPH_BYTES = 32 << 20


def encoder_of(config: Config) -> Config:
    """The encoder of an encoder-decoder, as a model."""
    assert config.source is not None
    return Config(**fields_of(config.source.encoder))


@dataclass(frozen=True, slots=True)
class SourceBudget:
    """What the encoder of a session allocates beside its weights: for steps of ``state.rows`` rows,
    a ``workspace``, keys and values of a layer, in f32 with ``exact`` arithmetic, and graphs."""

    state: TextRowsShape
    workspace: WorkspaceShape
    keys_nbytes: int
    exact: bool

    @classmethod
    def of(cls, parts: StepParts, context: int) -> Self:
        """The budget for sources of up to ``context`` tokens, of a session with ``parts``, which
        may be of paper. Raises SettingsError for longer sources than a step takes."""
        if context > LARGEST_STEP:
            raise SettingsError(
                f"a context of {context} tokens: an encoder reads up to {LARGEST_STEP} at once"
            )
        config, rows = encoder_of(parts.config), row_bucket(max(context, _ROWS))
        shape = TextRowsShape(rows, text_bucket(rows, rows), kinds_of(config))
        device = cast("Device", PaperDevice(parts.device))
        keys = TextKeys(device, config, rows, _dtype(parts.exact))
        kept = {STATES: 4 * rows * config.hidden}
        paper = replace(parts, work=cast("Workspace", PaperWorkspace(WorkspaceShape(kept))))
        state = cast("TextRows", PaperTextRows(shape))
        needs = Needs()
        for each in ((8, 1), (8, 4), (rows, 1), (rows, shape.texts)):
            sheet = Sheet(paper.work)
            _append_step(sheet, paper, config, keys, state, EncodeShape(*each, "none"))
            needs = needs.most(needs_of(sheet))
        needs = needs.for_rows(rows)
        work = WorkspaceShape(kept, zeroed=needs.zeroed, room=needs.room)
        return cls(shape, work, keys.nbytes, parts.exact)

    @property
    def nbytes(self) -> int:
        """All bytes."""
        state = sum(self.state.sizes().values())
        return state + self.workspace.nbytes + self.keys_nbytes + _GRAPH_BYTES


class SourceEncoder(Owner):
    """Steps that encode sources of sequences, and fill these sequences' caches of cross attention,
    queued on ``stream``: a recorded graph for each shape.

    ``parts`` are those of the session's steps. Several sources side by side are one step.
    """

    def __init__(
        self,
        parts: StepParts,
        budget: SourceBudget,
        stream: Stream,
        observer: Observer | None = None,
    ) -> None:
        device, self._config = parts.device, encoder_of(parts.config)
        self._budget = budget
        with ExitStack() as owners:
            dtype = _dtype(budget.exact)
            keys = TextKeys(device, self._config, budget.state.rows, dtype)
            self._keys = owners.enter_context(keys)
            self._state = owners.enter_context(TextRows(device, budget.state, stream))
            work = owners.enter_context(Workspace(device, budget.workspace))
            self._parts = replace(parts, work=work)
            graphs = TextGraphs(device, stream, self._plan, _GRAPH_BYTES, observer)
            self._graphs = owners.enter_context(graphs)
            self._owners = owners.pop_all()

    def encode(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Queue the encoding of sources by sequence, whose caches have room for them. Raises
        DriverError."""
        for slots in self._steps(sources):
            texts = [sources[slot] for slot in slots]
            rows = row_bucket(sum(map(len, texts)))
            shape = EncodeShape(rows, text_bucket(len(texts), rows), "none")
            self._graphs.make_ready(shape)
            self._state.write(texts, shape.rows, shape.texts, slots=slots)
            self._graphs.launch(shape)

    def close(self) -> None:
        """Free graphs and memory. Idempotent."""
        self._owners.close()

    def _steps(self, sources: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
        """The sequences of each step, as many as fit."""
        slots: list[int] = []
        rows = 0
        for slot, source in sources.items():
            if slots and rows + len(source) > self._budget.state.rows:
                yield slots
                slots, rows = [], 0
            slots.append(slot)
            rows += len(source)
        if slots:
            yield slots

    def _plan(self, shape: EncodeShape) -> Plan:
        plan = Plan(f"{shape.texts} sources, {shape.rows} rows")
        sheet = Sheet(self._parts.work)
        of = self._parts, self._config, self._keys, self._state
        _append_step(sheet, *of, shape)
        sheet.append_to(plan)
        plan.add_transfers()
        return plan


def _dtype(exact: bool) -> KvDtype:
    """The type of the encoder's keys and values."""
    return "f32" if exact else "f16"


def _append_step(
    sheet: Sheet,
    parts: StepParts,
    encoder: Config,
    keys: TextKeys,
    state: TextRows,
    shape: EncodeShape,
) -> None:
    """Append the launches of a step: the encoder's, then those of the decoder's caches."""
    rows, _ = rows_of(state, shape)
    place = parts.work[STATES].slice(0, 4 * shape.rows * encoder.hidden)
    step = StepOps(encoder, shape.rows)
    states = encoded(step, shape.texts, "none")
    own = replace(parts, config=encoder, cache=keys)
    lower(sheet, own, rows, step.graph, fixed={states: place})
    step = StepOps(parts.config, shape.rows)
    states = source_states(step)
    source_keys(step, states)
    slot = state.parts(shape.rows, shape.texts)["slot"]
    into = Rows(shape.rows, rows.keys, shape.rows, slot, rows.position)
    lower(sheet, parts, into, step.graph, fixed={states: place})
