"""A rank: what a session owns on one device, all of it or the share of one of several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from urdir.model.engine.budget import SessionBudget
from urdir.model.engine.draft_room import with_draft_room
from urdir.model.engine.runner import Observer, Steps
from urdir.model.engine.sources import SourceEncoder
from urdir.model.engine.speculation.open_source import open_source
from urdir.model.engine.stages import ChainedSteps, Place, building_layers
from urdir.model.engine.step import building
from urdir.model.lower.paper import PaperWorkspace
from urdir.model.lower.parts import StepParts
from urdir.model.memory.device_state import DecodeState
from urdir.model.memory.exchange import Exchange, RankExchange
from urdir.model.memory.host_pages import HostPages
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.recurrent_state import RecurrentState
from urdir.model.memory.storage import SequenceStorage
from urdir.model.memory.workspace import Workspace
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.stream import Stream
    from urdir.model.engine.speculation.model_source import Drafter, ModelSource
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weights import Weights


class Rank(Owner):
    """Cache, states, intermediates and recorded steps for ``weights``, on their device; all work
    is queued on ``stream``.

    ``followers`` are the other ranks: what is written to this one is written to them, and steps
    that are launched here are launched there. A ``drafter`` drafts in its steps (``source``).
    Prefixes have ``host_nbytes`` of host memory.
    """

    stream: Stream
    cache: KvCache
    parts: StepParts
    steps: Steps
    recurrent: RecurrentState
    storage: SequenceStorage
    source: ModelSource | None
    source_encoder: SourceEncoder | None

    def __init__(
        self,
        weights: Weights,
        budget: SessionBudget,
        *,
        exact: bool,
        exchange: RankExchange | None = None,
        observer: Observer | None = None,
        followers: Sequence[Rank] = (),
        drafter: Drafter | None = None,
        host_nbytes: int = 0,
    ) -> None:
        device = weights.device
        with ExitStack() as owners:
            stream = owners.enter_context(device.create_stream())
            caches = [rank.cache for rank in followers]
            is_alone = weights.config.share is None and weights.config.stage is None
            of_states = _host_nbytes_of_states(budget, host_nbytes) if is_alone else 0
            host_nbytes -= of_states
            cache = owners.enter_context(KvCache(device, budget.cache, stream, caches, host_nbytes))
            held = [of for rank in followers if (of := rank.parts.recurrent) is not None]
            recurrent = owners.enter_context(RecurrentState(device, budget.recurrent, stream, held))
            states = [rank.parts.state for rank in followers]
            state = owners.enter_context(DecodeState(device, budget.state, stream, states))
            paper = cast("Workspace", PaperWorkspace(budget.workspace))
            parts = StepParts(
                device=device,
                config=weights.config,
                weights=weights,
                cache=cache,
                state=state,
                work=paper,
                exact=exact,
                recurrent=recurrent,
                exchange=exchange,
            )
            shape = budget.workspace
            if drafter is not None:
                shape = with_draft_room(drafter, parts, cache, stream, budget.shapes, shape)
            work = owners.enter_context(Workspace(device, shape))
            self.parts = replace(parts, work=work)
            self.source = None
            if drafter is not None:
                sources = [rank.source for rank in followers if rank.source is not None]
                opened = open_source(drafter, self.parts, cache, stream, sources)
                self.source = owners.enter_context(opened)
            self.steps = owners.enter_context(
                self._open_steps(stream, budget.graphs, observer, followers)
            )
            self.source_encoder = None
            if budget.source is not None:
                encoder = SourceEncoder(self.parts, budget.source, stream, observer)
                self.source_encoder = owners.enter_context(encoder)
            self.stream, self.cache, self.recurrent = stream, cache, recurrent
            host = HostPages[Any](device, stream, [recurrent], of_states) if of_states else None
            if host is not None:
                owners.enter_context(host)
            self.storage = SequenceStorage(cache, recurrent, host)
            self._owners = owners.pop_all()

    def _open_steps(
        self, stream: Stream, graphs: int, observer: Observer | None, followers: Sequence[Rank]
    ) -> Steps:
        """The steps of all layers, or of this rank's stage; the first rank has those of all."""
        steps = [(rank.steps, rank.stream) for rank in followers]
        if self.parts.config.stage is None:
            build = partial(building, source=self.source, known={})
            return Steps(self.parts, graphs, observer, steps, build)
        if followers:
            places = [Place(self.parts, stream), *(Place(r.parts, r.stream) for r in followers)]
            return ChainedSteps(places, graphs, observer, steps)
        return Steps(self.parts, graphs, build=building_layers)

    def close(self) -> None:
        """Free all of it. Idempotent."""
        self._owners.close()


def _host_nbytes_of_states(budget: SessionBudget, nbytes: int) -> int:
    """The part of host memory for shared states: a quarter beside pages. On several devices
    there is none: one has the bookkeeping of states for all."""
    if not budget.recurrent.layers or not budget.recurrent.shared:
        return 0
    return nbytes // 4 if budget.cache.layers else nbytes


def open_ranks(
    owners: ExitStack,
    weights: Sequence[Weights],
    settings: SessionSettings,
    observer: Observer | None,
    drafters: Sequence[Drafter] = (),
) -> tuple[Rank, Exchange | None]:
    """Open a rank for each of ``weights``, with one of ``drafters`` if given, closed by ``owners``.

    Returns the first rank, which leads the others, and the exchange of several ranks."""
    budgets = [SessionBudget.of(each, settings) for each in weights]
    exchange, shape = None, budgets[0].exchange
    if shape is not None:
        exchange = owners.enter_context(Exchange([each.device for each in weights], shape))
    ranks: list[Rank] = []
    of_ranks: Sequence[Drafter | None] = drafters or [None] * len(weights)
    for each, own, drafter in reversed([*zip(weights, budgets, of_ranks, strict=True)]):
        share, is_lead = each.config.share, each is weights[0]
        rank = Rank(
            each,
            own,
            exact=settings.exact,
            exchange=exchange.of(share) if exchange and share else None,
            observer=observer if is_lead else None,
            followers=ranks if is_lead else (),
            drafter=drafter,
            host_nbytes=settings.prefix_host_memory // len(weights),
        )
        ranks.insert(0, owners.enter_context(rank))
    return ranks[0], exchange
