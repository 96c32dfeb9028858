"""A model by itself as the draft of another one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from urdir.model.engine.budget import MemoryPlan, SessionBudget, check_context
from urdir.model.engine.realizar.eager import EagerSteps
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.lower.paper import paper_weights
from urdir.model.memory.prefix_tree import common_length
from urdir.model.memory.weights import Weights
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings


@contextmanager
def open_alone(
    gguf: ModelFile, config: Config, device: Device, settings: SessionSettings
) -> Iterator[Session]:
    """A session of one model. Raises ModelError for a context that it does not take and where there
    is too little memory."""
    check_context(config, settings.context)
    config = config.at_context(settings.context)
    budget = SessionBudget.of(paper_weights(gguf, config, device), settings)
    MemoryPlan.of(gguf, config, budget).check(device)
    with ExitStack() as owners:
        weights = owners.enter_context(Weights.load(gguf, config, device))
        yield owners.enter_context(Session(device, weights, settings))


class PlainDraft(Owner):
    """A draft with a cache of its own in ``session``, one sequence."""

    def __init__(self, session: Session) -> None:
        self._steps = EagerSteps(session)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow ``tokens``, greedily. What the cache has of other tokens
        is forgotten; the next proposal goes on from what it has in common."""
        steps = self._steps
        known = min(common_length(tuple(steps.tokens[0]), tuple(tokens)), len(tokens) - 1)
        steps.truncate(steps.kept(known))
        steps.feed(tokens[len(steps.tokens[0]) :])
        return [steps.step()[0] for _ in range(count)]

    def close(self) -> None:
        """Release the session. Idempotent."""
        self._steps.close()
