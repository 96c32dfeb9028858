"""How large a session is to be, so that a model and it fit every device that has a share of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from urdir.model.engine.budget import RESERVE_BYTES, MemoryPlan, SessionBudget
from urdir.model.lower.paper import paper_weights
from urdir.model.memory.buckets import chunks_of

#: Of what weights, sequences' states and the pages of one sequence leave, the part for states that
#: are kept for requests to share, and the most of them. One of qwen3.5-4b takes as much as 1,600
#: tokens of its cache.
STATES_PART, MOST_STATES = 1 / 4, 256

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weights import Weights


def fitting_settings(
    file: ModelFile,
    ranks: Sequence[tuple[Config, Device]],
    wanted: SessionSettings,
    *,
    memory_share: float = 0.0,
    fewer_sequences: bool = False,
) -> SessionSettings:
    """The ``wanted`` settings, or smaller ones, for a model of which each of ``ranks`` has a share
    on a device of its own.

    Prompt steps have the most tokens that fit. ``fewer_sequences`` permits fewer of these.
    With a ``memory_share`` of what is free, there are as many pages as fit it, unless they are
    given, beside states of recurrent layers to share. Raises ModelError if the model and the
    smallest session do not fit.
    """
    places = [Place(file, share, device) for share, device in ranks]
    fitting = replace(wanted, shared_states=0) if memory_share else wanted
    if fewer_sequences:
        part = memory_share or 1.0
        sequences = min(place.most_sequences(fitting, part) for place in places)
        fitting = replace(fitting, sequences=sequences)
    if memory_share:
        states = min(place.most_states(fitting, memory_share) for place in places)
        fitting = replace(fitting, shared_states=states)
    if memory_share and fitting.pages is None:
        found = [place.most_pages(fitting, memory_share) for place in places]
        pages = min((count for count in found if count is not None), default=None)
        fitting = replace(fitting, pages=pages)
    return replace(fitting, chunk=min(place.largest_chunk(fitting) for place in places))


@dataclass(frozen=True)
class Place:
    """A device, and the share of a model (``config``) that is to run on it."""

    file: ModelFile
    config: Config
    device: Device

    @cached_property
    def weights(self) -> Weights:
        """The weights, of paper."""
        return paper_weights(self.file, self.config, self.device)

    def budget(self, settings: SessionSettings, **changed: Any) -> SessionBudget:
        """What a session takes there, with some of its settings changed."""
        return SessionBudget.of(self.weights, replace(settings, **changed))

    def plan(self, settings: SessionSettings, **changed: Any) -> MemoryPlan:
        """What the model and the session take."""
        return MemoryPlan.of(self.file, self.config, self.budget(settings, **changed))

    def most_sequences(self, settings: SessionSettings, share: float) -> int:
        """As many sequences as the settings say or, where the states of recurrent layers would take
        more than half of what is left of a ``share`` of the free memory, a half of them, a quarter,
        ...: the rest is for pages."""
        most = settings.sequences
        if not self.config.recurrents:
            return most
        free = self._free(share)
        while most > 1:
            plan = self.plan(settings, sequences=most, pages=self.least_pages(settings))
            if plan.total + plan.recurrent <= free:
                break
            most //= 2
        return most

    def most_states(self, settings: SessionSettings, share: float) -> int:
        """The most states of recurrent layers that are worth their memory beside the pages, for
        sequences to share; 0 if they cannot share prefixes."""
        if not self.config.recurrents:
            return 0
        budget = self.budget(settings, pages=settings.pages or self.least_pages(settings))
        if not budget.recurrent.layers or not budget.cache.share_len:
            return 0
        plan = MemoryPlan.of(self.file, self.config, budget)
        left = max(0.0, self._free(share) - plan.total)
        return min(MOST_STATES, int(left * STATES_PART / budget.recurrent.nbytes))

    def most_pages(self, settings: SessionSettings, share: float) -> int | None:
        """The most pages for which the model and the session take up to a ``share`` of what the
        device has free; no more than all sequences fill at their longest; None for a model without
        attention. Raises ModelError if a sequence of the whole context does not fit."""
        whole = self.budget(settings, pages=None)  # pages for all sequences at once
        if not whole.cache.layers:
            return None
        layout = next(iter(whole.cache.layers.values())).layout
        most = max(of.layout.pages for of in whole.cache.layers.values())
        least = most // layout.sequences
        free = self._free(share)
        fixed = self.plan(settings, pages=least)
        if free < fixed.total:
            fixed.check(self.device)

        def nbytes(pages: int) -> int:  # layers with windows have other numbers of them
            return sum(whole.cache.with_pages(pages).sizes().values())

        counts = range(least, most + 1)
        fitting = bisect_right(counts, free - fixed.total + fixed.kv_cache, key=nbytes)
        return counts[max(0, fitting - 1)]

    def _free(self, share: float) -> float:
        """Bytes of a ``share`` of what the device has free."""
        return share * self.device.usable_memory() - RESERVE_BYTES

    def least_pages(self, settings: SessionSettings) -> int | None:
        """The pages of one sequence of the whole context; None for a model without pages."""
        alone = self.budget(settings, sequences=1, pages=None).cache.layers.values()
        return max((of.layout.pages for of in alone), default=0) or None

    def largest_chunk(self, settings: SessionSettings) -> int:
        """The tokens of the largest prompt steps, up to those of the settings, with which the model
        and the session fit. Raises ModelError if none fits."""
        for rows in reversed(chunks_of(exact=False, most=settings.chunk)):
            budget = self.budget(settings, chunk=rows)
            plan = MemoryPlan.of(self.file, self.config, budget)
            if plan.fits(self.device):
                break
        plan.check(self.device)
        return budget.shapes.chunks[-1]
