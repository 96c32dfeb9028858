"""What a session has on one device: all of it, or the share of one of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from urdir.model.blocks.parts import StepParts
from urdir.model.engine.runner import Observer, Steps
from urdir.model.memory.device_state import DecodeState
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.recurrent_state import RecurrentState
from urdir.model.memory.workspace import ZEROED
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.stream import Stream
    from urdir.model.memory.budget import SessionBudget
    from urdir.model.memory.weights import Weights


class Rank(Owner):
    """Cache, states, intermediates and recorded steps for ``weights``, on their device; all work
    is queued on ``stream``.

    ``followers`` are the other ranks: what is written to this one is written to them, and steps
    that are launched here are launched there.
    """

    stream: Stream
    parts: StepParts
    steps: Steps
    recurrent: RecurrentState

    def __init__(
        self,
        weights: Weights,
        budget: SessionBudget,
        *,
        exact: bool,
        exchange: RankExchange | None = None,
        observer: Observer | None = None,
        followers: Sequence[Rank] = (),
    ) -> None:
        device = weights.device
        with ExitStack() as owners:
            stream = owners.enter_context(device.create_stream())
            caches = [rank.parts.cache for rank in followers]
            cache = owners.enter_context(KvCache(device, budget.cache, stream, caches))
            held = [rank.recurrent for rank in followers]
            recurrent = owners.enter_context(RecurrentState(device, budget.recurrent, stream, held))
            states = [rank.parts.state for rank in followers]
            state = owners.enter_context(DecodeState(device, budget.state, stream, states))
            work = owners.enter_context(device.arena(budget.workspace, "workspace"))
            for name in ZEROED & work.keys():
                work[name].fill(0)
            self.parts = StepParts(
                device=device,
                config=weights.config,
                weights=weights,
                cache=cache,
                state=state,
                work=work,
                exact=exact,
                recurrent=recurrent,
                exchange=exchange,
            )
            steps = [(rank.steps, rank.stream) for rank in followers]
            self.steps = owners.enter_context(Steps(self.parts, observer, steps))
            self.stream, self.recurrent = stream, recurrent
            self._owners = owners.pop_all()

    def close(self) -> None:
        """Free all of it; closing twice does nothing."""
        self._owners.close()
