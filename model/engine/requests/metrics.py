"""Counts and gauges of a service: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from urdir.model.engine.requests.scheduler import Scheduler
    from urdir.model.engine.step_clock import StepClock
    from urdir.model.memory.counted_pages import CountedPages
    from urdir.model.memory.prefix_states import PrefixStates


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts since the start of a service, the limit ``sequences``; ``queued``, ``running``, pages
    and graphs are gauges."""

    queued: int = 0
    running: int = 0
    sequences: int = 0  # requests that may run at once
    pages_used: int = 0
    pages_total: int = 0
    states_kept: int = 0  # of recurrent layers, for prompts with a common prefix
    states_total: int = 0  # capacity for kept states
    prefix_queries: int = 0  # prompt tokens that were looked up
    prefix_hits: int = 0  # of these, tokens that were found
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    begun: int = 0  # requests that waited no longer
    queue_seconds: float = 0.0  # that these had waited
    drafted_tokens: tuple[int, ...] = ()  # by place in a step
    accepted_tokens: tuple[int, ...] = ()  # of these
    busy_seconds: float = 0.0  # in which the device ran steps
    idle_seconds: float = 0.0  # between steps, while there was work to do
    graph_bytes: int = 0  # of device memory, of recorded steps and kernels
    graphs_recorded: int = 0  # ahead, of steps that are likely
    graphs_wanted: int = 0  # of these steps

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        pools: Sequence[CountedPages],
        states: PrefixStates | None,
        clock: StepClock | None,
        graph_bytes: int,
    ) -> Self:
        """Current metrics, from the parts of a service."""
        counts = scheduler.counts
        return cls(
            queued=scheduler.queued,
            running=scheduler.running,
            sequences=scheduler.running + len(scheduler.tasks.free_slots),
            pages_used=sum(pool.used for pool in pools),
            pages_total=sum(pool.pages for pool in pools),
            states_kept=states.known if states else 0,
            states_total=states.places if states else 0,
            prefix_queries=counts.prompt_tokens,
            prefix_hits=counts.cached_tokens,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            steps=counts.steps,
            preemptions=counts.preemptions,
            begun=counts.begun,
            queue_seconds=counts.queue_seconds,
            drafted_tokens=tuple(counts.drafted),
            accepted_tokens=tuple(counts.accepted),
            busy_seconds=clock.busy_seconds if clock else 0.0,
            idle_seconds=clock.idle_seconds if clock else 0.0,
            graph_bytes=graph_bytes,
        )
