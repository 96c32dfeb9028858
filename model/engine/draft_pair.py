"""A model and its draft, described together and opened on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.blocks.draft import (
    EMBEDDED,
    GIVEN,
    JOINED,
    PASSED_ON,
    DraftLaunches,
    DraftParts,
)
from urdir.model.blocks.draft_nextn import NextnDraft
from urdir.model.engine.drafts import Draft, DraftShape
from urdir.model.engine.session import Session
from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.tapped import nextn_heads, tapped
from urdir.model.memory.budget import MemoryPlan, SessionBudget, check_context
from urdir.model.memory.weights import Weights

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and a draft that fits it. ``config`` describes the model, which keeps the streams
    that the draft reads, ``own`` the draft's layers, whose weights are the model's. ``widths`` are
    those of its further intermediates, ``most`` the tokens that it can draft at once, 0: any
    number."""

    gguf: ModelFile
    config: Config
    own: Config
    widths: Mapping[str, int]
    launches: Callable[[DraftParts], DraftLaunches]
    most: int = 0

    def at_context(self, context: int) -> Pair:
        """The same for sequences of up to ``context`` tokens. Raises SettingsError for more than
        the model takes."""
        check_context(self.config, context)
        config, own = (of.at_context(context) for of in (self.config, self.own))
        return replace(self, config=config, own=own)


def nextn_pair(gguf: ModelFile) -> Pair:
    """A model whose draft are its own heads for predicting several tokens. Raises UnsupportedError
    for a file without any."""
    config = Config.from_gguf(gguf, nextn=True)
    if not config.nextn:
        key = f"{gguf.architecture}.nextn_predict_layers"
        raise UnsupportedError(
            f"{gguf.path}: there are no layers for predicting several tokens (MTP, '{key}'): give "
            "the file of a draft model"
        )
    hidden, heads = config.hidden, len(config.nextn)
    return Pair(
        gguf,
        tapped(config, [config.n_layers]),
        nextn_heads(config),
        {EMBEDDED: hidden, JOINED: 2 * hidden, GIVEN: hidden, PASSED_ON: hidden},
        NextnDraft,
        heads if heads > 1 else 0,
    )


@contextmanager
def open_pair(pair: Pair, device: Device, settings: SessionSettings, most: int) -> Iterator[Draft]:
    """A session of the model, and the draft of up to ``most`` tokens beside it. Raises ModelError
    where there is too little memory."""
    pair = pair.at_context(settings.context)
    shape = DraftShape(pair.own, settings, pair.widths, min(most, pair.most or most))
    budget = SessionBudget.of(pair.config, device.properties.sm_count, settings)
    plan = MemoryPlan.of(pair.gguf, pair.config, budget)
    replace(plan, workspace=plan.workspace + shape.nbytes(device)).check(device)
    with ExitStack() as owners:
        weights = owners.enter_context(Weights.load(pair.gguf, pair.config, device))
        session = owners.enter_context(Session(device, weights, settings))
        yield owners.enter_context(Draft(session, shape, weights, pair.launches))
