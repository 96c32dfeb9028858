"""How much device memory everything takes: computed here and nowhere else, before anything is
allocated.

A session allocates what its `SessionBudget` says; a `MemoryPlan` adds the weights, and is checked
against what the device has free.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from urdir.model.engine.batch import ShapeBuckets
from urdir.model.engine.sources import SourceBudget
from urdir.model.engine.step_needs import step_needs
from urdir.model.errors import NoRoomError, SettingsError
from urdir.model.families.config import Config
from urdir.model.lower.attend import segment_alignment
from urdir.model.lower.paper import Needs, PaperShapes, paper_parts
from urdir.model.lower.parts import StepParts, device_limits
from urdir.model.lower.rows import state_alignment
from urdir.model.memory.buckets import choosing_rows, chunks_of, common_rows, drafted_rows
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.device_state import StateShape, mailbox_slots
from urdir.model.memory.draft_memory import with_draft
from urdir.model.memory.exchange import ExchangeShape
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.walk import Walk
from urdir.model.memory.weight_sizes import weight_sizes
from urdir.model.memory.weights import STAGING_BYTES, Weights
from urdir.model.memory.workspace import WorkspaceShape, kept_shape, outputs_nbytes
from urdir.ptxgen.spec import ceil_div

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_model import DraftModel

#: What recorded graphs may take: of steps with one row, and more for each further number of rows
#: whose graphs are recorded ahead. One of an 8B model takes 0.7 MB, of four steps at once 2.8 MB.
GRAPH_BYTES, MORE_GRAPH_BYTES = 64 << 20, 16 << 20
#: What modules and the driver's own bookkeeping may take beside all that.
RESERVE_BYTES = 32 << 20


def check_context(config: Config, context: int) -> None:
    """Raise SettingsError for a context that the model does not take."""
    if not 0 < context <= config.context_length:
        raise SettingsError(
            f"a context of {context} tokens: the model takes 1 to {config.context_length}"
        )


@dataclass(frozen=True, slots=True)
class SessionBudget:
    """What a session allocates on a device.

    ``cache`` is the shape of the layers' caches, ``recurrent`` that of their states, ``state`` that
    of the decode state, ``exchange`` that of inboxes if there are several ranks. ``shapes`` are the
    shapes of steps, whose values need the room of ``workspace``. ``draft`` are bytes by name
    of what a draft model keeps, beside ``draft_weights`` of its own. ``source`` is the budget of an
    encoder-decoder's encoder.
    """

    cache: CacheShape
    recurrent: RecurrentShape
    shapes: ShapeBuckets
    state: StateShape
    workspace: WorkspaceShape
    exchange: ExchangeShape | None
    graphs: int
    draft: Mapping[str, int]
    draft_weights: int = 0
    source: SourceBudget | None = None

    @classmethod
    def of(cls, weights: Weights, settings: SessionSettings) -> Self:
        """The budget of a session beside weights, on their device; both may be of paper
        (`lower.paper`)."""
        config, device = weights.config, weights.device
        sequences, exact, drafts = settings.sequences, settings.exact, settings.drafts
        rows = choosing_rows(sequences) if drafts is None else drafted_rows(sequences, drafts.most)
        chunks = chunks_of(exact, min(settings.chunk, settings.context))
        # steps ahead of the reader may be undone, and drafts
        cache = CacheShape.of(config, settings, rows=max(chunks[-1], mailbox_slots(drafts)))
        state = StateShape(
            *(sequences, cache.max_len, rows, chunks[-1], config.vocab_size),
            units=0 if exact else _units(config, cache.max_len, rows, chunks[-1]),
            drafts=drafts,
            states=bool(config.recurrents),
            adapters=config.takes_adapters,
            sources=config.source is not None,
        )
        sms = device.properties.sm_count
        of_steps = config, cache, rows, chunks[-1], sms, exact
        work = kept_shape(*of_steps, drafts=0 if drafts is None else drafts.most)
        draft: Mapping[str, int] = {}
        if (beside := settings.draft_model) is not None and drafts is not None:
            own = cache.after(config.n_layers)
            work = with_draft(work, beside, own, rows, chunks[-1], sms, exact=exact)
            draft = beside.state_sizes(sequences, rows, drafts)
        budget = cls(
            cache=cache,
            recurrent=RecurrentShape.of(
                *(config, sequences, settings.shared_states),
                drafts=0 if drafts is None else drafts.most,
            ),
            shapes=_shapes(weights, settings, cache, chunks),
            state=state,
            workspace=work,
            exchange=ExchangeShape.of(config, rows, rows + chunks[-1]),
            graphs=GRAPH_BYTES
            + MORE_GRAPH_BYTES * (len(common_rows(sequences if drafts is None else rows)) - 1),
            draft=draft,
            draft_weights=0 if beside is None else _draft_weights(beside),
        )
        source = None
        if config.source is not None:
            source = SourceBudget.of(_paper_parts(budget, weights, exact), settings.context)
        return replace(budget, workspace=_with_room(budget, weights, settings), source=source)


def _shapes(
    weights: Weights, settings: SessionSettings, cache: CacheShape, chunks: tuple[int, ...]
) -> ShapeBuckets:
    """The shapes of the steps of a session."""
    config, target = weights.config, weights.device.native_target
    alignment, walk = state_alignment(config), None
    if not settings.exact:
        walk = Walk.of(config, cache.max_len, chunks[-1], target)
        aligned = [segment_alignment(config, cache, target), 1 if walk is None else walk.rows]
        if (draft := settings.draft_model) is not None:
            own = cache.after(config.n_layers)
            aligned.append(segment_alignment(draft.config, own, target))
        alignment = math.lcm(alignment, *aligned)
    apart = not (settings.exact or walk) and any(m.written_out for m in config.attentions)
    shapes = ShapeBuckets.of(
        chunks,
        cache.max_len,
        choosing_rows(settings.sequences),
        alignment,
        begin_apart=apart,
        walk=walk,
        drafts=0 if settings.drafts is None else settings.drafts.most,
    )
    return replace(shapes, one_length=not settings.exact and attends_alike(config))


def attends_alike(config: Config) -> bool:
    """Whether attention of prompts is the same for few keys as for many: they are all read, as they
    are."""
    return not any(
        of.latent or of.indexer or of.follows_indexer or of.compression for of in config.attentions
    )


def _paper_parts(budget: SessionBudget, weights: Weights, exact: bool) -> StepParts:
    """The parts of steps of a session, without memory."""
    shapes = budget.cache, budget.recurrent, budget.state, budget.exchange, budget.workspace
    return paper_parts(weights, PaperShapes(*shapes), exact)


def _with_room(
    budget: SessionBudget, weights: Weights, settings: SessionSettings
) -> WorkspaceShape:
    """The workspace with room for the largest steps. How many pages and states to share there are
    changes nothing; what was measured for a model, a device and settings is kept."""
    workspace = budget.workspace
    alike = replace(settings, pages=None, shared_states=None, prefix_host_memory=0)
    key = weights.config, weights.layouts, device_limits(weights.device), alike
    needs = _measured.get(key)
    if needs is None:
        parts = _paper_parts(budget, weights, settings.exact)
        needs = step_needs(parts, budget.shapes, budget.state.rows)
        if len(_measured) >= MOST_MEASURED:
            _measured.clear()
        _measured[key] = needs
    room = max(needs.room, outputs_nbytes(workspace.outputs))
    return replace(workspace, zeroed={**workspace.zeroed, **needs.zeroed}, room=room)


#: What steps need, and of how many sessions it is known at most.
_measured: dict[Hashable, Needs] = {}
MOST_MEASURED = 64


def _draft_weights(draft: DraftModel) -> int:
    """Bytes of the weights that a draft model has beside its model's."""
    return 0 if draft.file is None else sum(weight_sizes(draft.file, draft.config).values())


def _units(config: Config, max_len: int, rows: int, chunk: int) -> int:
    """Units of the longest walk of a step's prompts; 0 where none do."""
    walk = Walk.of(config, max_len, chunk)
    return 0 if walk is None else walk.most_units(min(rows, ceil_div(chunk, walk.rows)))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of device memory by owner; ``staging`` is freed once the weights are loaded."""

    weights: int
    kv_cache: int
    recurrent: int
    workspace: int
    state: int
    exchange: int
    graphs: int
    staging: int

    @classmethod
    def of(cls, file: ModelFile, config: Config, session: SessionBudget) -> Self:
        """The plan for a model with one session."""
        return cls(
            weights=sum(weight_sizes(file, config).values()) + session.draft_weights,
            kv_cache=sum(session.cache.sizes().values()),
            recurrent=sum(session.recurrent.sizes().values()),
            workspace=session.workspace.nbytes,
            state=sum(session.state.sizes().values())
            + sum(session.draft.values())
            + (session.source.nbytes if session.source else 0),
            exchange=sum(session.exchange.sizes().values()) if session.exchange else 0,
            graphs=session.graphs,
            staging=STAGING_BYTES,
        )

    @property
    def total(self) -> int:
        """Bytes needed at the fullest moment."""
        caches = self.kv_cache + self.recurrent
        fixed = self.weights + self.state + self.exchange + self.graphs + self.staging
        return fixed + caches + self.workspace

    def fits(self, device: Device) -> bool:
        """Whether the device has that much free."""
        return self.total + RESERVE_BYTES <= device.usable_memory()

    def as_dict(self) -> dict[str, int]:
        """Bytes by owner and in total, for printing."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        return {**parts, "total": self.total}

    def check(self, device: Device) -> None:
        """Raise NoRoomError with needed and available bytes when the device has too little."""
        if not self.fits(device):
            free = device.usable_memory()
            raise NoRoomError(
                f"not enough memory on {device.name}: {self.total + RESERVE_BYTES:,} bytes needed "
                f"(weights {self.weights:,}, KV cache {self.kv_cache:,}, recurrent states "
                f"{self.recurrent:,}, workspace {self.workspace:,}, graphs {self.graphs:,}, "
                f"staging {self.staging:,}), {free:,} available: a shorter context, fewer "
                "sequences, a smaller model or streamed weights need less"
            )
