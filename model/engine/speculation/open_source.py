"""The kinds of drafts of a draft model: which one serves the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.model.engine.speculation.block_source import BlockSource
from urdir.model.engine.speculation.head_source import AssistantSource, HeadSource
from urdir.model.engine.speculation.model_source import Drafter, ModelSource
from urdir.model.engine.speculation.plain_source import PlainSource

if TYPE_CHECKING:
    from urdir.driver.stream import Stream
    from urdir.model.lower.parts import StepParts
    from urdir.model.memory.kv_cache import KvCache


def open_source(
    drafter: Drafter,
    parts: StepParts,
    cache: KvCache,
    stream: Stream,
    followers: Sequence[ModelSource] = (),
) -> ModelSource:
    """What drafts in the steps of ``parts``, whose ``cache`` has the draft's layers last. What is
    written to it is also written to the ``followers``, those of other ranks."""
    kind: type[ModelSource] = HeadSource if drafter.model.slots == 1 else BlockSource
    if drafter.launches is None:
        kind = PlainSource
    elif drafter.model.shares_cache:
        kind = AssistantSource
    opened = kind(drafter, parts, cache, stream)
    opened.followers = tuple(followers)
    return opened
