"""How much device memory everything takes: computed here and nowhere else, before anything is
allocated.

A session allocates what its `SessionBudget` says; a `MemoryPlan` adds the weights, and is checked
against what the device has free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from urdir.model.errors import ModelError, SettingsError
from urdir.model.families.config import Config
from urdir.model.memory.buckets import choosing_rows, chunks_of, common_rows, drafted_rows
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.device_state import StateShape, mailbox_slots
from urdir.model.memory.draft_memory import with_draft
from urdir.model.memory.exchange import ExchangeShape
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.walk import Walk
from urdir.model.memory.weights import STAGING_BYTES, weight_sizes
from urdir.model.memory.workspace import workspace_sizes
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

    ``cache`` is what the layers' caches look like, ``recurrent`` what their states do,
    ``workspace`` bytes by name, ``state`` what the decode state is made for, ``chunks`` the rows of
    prompt steps, ``exchange`` what the inbox is like where there are several ranks. ``draft`` are
    bytes by name of what a draft model keeps, beside ``draft_weights`` of its own.
    """

    cache: CacheShape
    recurrent: RecurrentShape
    chunks: tuple[int, ...]
    state: StateShape
    workspace: Mapping[str, int]
    exchange: ExchangeShape | None
    graphs: int
    draft: Mapping[str, int]
    draft_weights: int = 0

    @classmethod
    def of(cls, config: Config, sm_count: int, settings: SessionSettings) -> Self:
        """The budget of a session on a device of ``sm_count`` SMs."""
        sequences, exact, drafts = settings.sequences, settings.exact, settings.drafts
        rows = choosing_rows(sequences) if drafts is None else drafted_rows(sequences, drafts.most)
        chunks = chunks_of(exact, min(settings.chunk, settings.context))
        # steps ahead of the reader may be undone, and drafts
        cache = CacheShape.of(config, settings, rows=max(chunks[-1], mailbox_slots(drafts)))
        work = workspace_sizes(config, cache, rows, chunks[-1], sm_count, exact)
        draft: Mapping[str, int] = {}
        if (beside := settings.draft_model) is not None and drafts is not None:
            own = cache.after(config.n_layers)
            work = with_draft(work, beside, own, rows, chunks[-1], sm_count, exact=exact)
            draft = beside.state_sizes(sequences, rows, drafts.most)
        return cls(
            cache=cache,
            recurrent=RecurrentShape.of(
                *(config, sequences, settings.shared_states),
                drafts=0 if drafts is None else drafts.most,
            ),
            chunks=chunks,
            state=StateShape(
                *(sequences, cache.max_len, rows, chunks[-1], config.vocab_size),
                units=0 if exact else _units(config, cache.max_len, rows, chunks[-1]),
                drafts=drafts,
                states=bool(config.recurrents),
            ),
            workspace=work,
            exchange=ExchangeShape.of(config, rows, rows + chunks[-1]),
            graphs=GRAPH_BYTES
            + MORE_GRAPH_BYTES * (len(common_rows(sequences if drafts is None else rows)) - 1),
            draft=draft,
            draft_weights=0 if beside is None else _draft_weights(beside),
        )


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
            workspace=sum(session.workspace.values()),
            state=sum(session.state.sizes().values()) + sum(session.draft.values()),
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
        return self.total + RESERVE_BYTES <= device.memory_info()[0]

    def as_dict(self) -> dict[str, int]:
        """Bytes by owner and in total, for printing."""
        parts = {name: getattr(self, name) for name in self.__slots__}
        return {**parts, "total": self.total}

    def check(self, device: Device) -> None:
        """Raise ModelError with needed and available bytes when the device has too little."""
        if not self.fits(device):
            free, _ = device.memory_info()
            raise ModelError(
                f"not enough memory on {device.name}: {self.total + RESERVE_BYTES:,} bytes needed "
                f"(weights {self.weights:,}, KV cache {self.kv_cache:,}, recurrent states "
                f"{self.recurrent:,}, workspace {self.workspace:,}, graphs {self.graphs:,}, "
                f"staging {self.staging:,}), {free:,} available: a shorter context, fewer "
                "sequences or a smaller model need less"
            )
