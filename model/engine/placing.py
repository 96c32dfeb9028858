"""Where the matrices of a model lie: on the device, or in host memory."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.engine.budget import RESERVE_BYTES
from urdir.model.engine.fitting import Place
from urdir.model.errors import UnsupportedError
from urdir.model.families.placement import (
    EXPERTS,
    Placement,
    cached_mixtures,
    streamable,
    with_streaming,
)
from urdir.model.families.stored import stored_in
from urdir.model.memory.streamed import check_host
from urdir.model.memory.weight_sizes import streamed_nbytes, weight_sizes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.options import EngineOptions
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings

#: Of many users' sequences, so many have room for a whole context beside weights that fit.
_WHOLE_SEQUENCES = 4


def placed(
    config: Config,
    file: ModelFile,
    devices: Sequence[Device],
    options: EngineOptions,
    with_draft: Callable[[SessionSettings], SessionSettings] = lambda settings: settings,
) -> Config:
    """The description with the matrices in host memory that ``options.placement`` says; of each
    device no more memory than these permit is used from now on. ``with_draft`` adds the draft model
    to the settings of a session.

    Several ``devices`` stream nothing: ``fit`` has no effect there. Raises ModelError for too
    little host memory, UnsupportedError for matrices in host memory for several devices.
    """
    for device in devices:
        device.limit_memory(options.device_memory)
    config = replace(config, random_routing=options.random_routing)
    placement = options.placement or Placement()
    names = placement.on_host(config)
    room = partial(_room, Place(file, config, devices[0]), options, with_draft)
    if placement.fit and len(devices) == 1:
        names = fitting_names(file, config, names, room())
    if not names:
        return config
    if len(devices) > 1:
        raise UnsupportedError(
            f"weights in host memory for {len(devices)} GPUs are not supported: leave all on the "
            "GPUs"
        )
    slots = placement.expert_slots
    if slots is None:
        slots = _fitting_slots(file, config, names, room())
    config = with_streaming(config, names, slots)
    check_host(streamed_nbytes(file, config))
    return config


def _room(
    place: Place,
    options: EngineOptions,
    with_draft: Callable[[SessionSettings], SessionSettings],
) -> float:
    """Bytes of a device that a session as it is wanted leaves to weights; of many users', some
    sequences have room for a whole context."""
    context = options.chosen_context(place.config)
    session = with_draft(options.session(place.config, place.device, context))
    if session.page_len:
        session = replace(session, shared_states=0 if options.memory_share else None)
        whole = (place.least_pages(session) or 1) * min(_WHOLE_SEQUENCES, session.sequences)
        session = replace(session, pages=session.pages or whole)
    beside = place.plan(session).total - _weights(place.file, place.config)
    free = (options.memory_share or 1.0) * place.device.usable_memory()
    return free - RESERVE_BYTES - beside


def fitting_names(
    file: ModelFile, config: Config, names: frozenset[str], room: float
) -> frozenset[str]:
    """The tensors that lie in host memory where the others have ``room`` bytes: ``names``, and as
    few more as are needed. Experts come first, as few of them are used at a time; layers are chosen
    evenly, so that the link is busy all the time."""
    choices = [names, *(names | more for more in _choices(config))]

    def fits(choice: frozenset[str]) -> bool:
        return _weights(file, with_streaming(config, choice)) <= room

    return choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]


def _fitting_slots(file: ModelFile, config: Config, names: frozenset[str], room: float) -> int:
    """The most experts of a layer whose caches fit ``room`` bytes beside the weights; 0 where those
    of a row do not."""
    mixtures = cached_mixtures(with_streaming(config, names, 1))
    most = max((of.router.experts for of in mixtures), default=0)
    least = max((of.router.used for of in mixtures), default=0)

    def exceeds(slots: int) -> bool:
        return _weights(file, with_streaming(config, names, slots)) > room

    slots = bisect_left(range(1, most + 1), True, key=exceeds)
    return slots if slots >= least else 0


def _weights(file: ModelFile, config: Config) -> int:
    return sum(weight_sizes(file, config).values())


def _choices(config: Config) -> Iterator[frozenset[str]]:
    """More and more tensors."""
    can = streamable(config)
    layers = [frozenset(of.name for of in stored_in(layer)) & can for layer in config.layers]
    experts = [frozenset(n for n in names if re.search(EXPERTS, n)) for names in layers]
    before = frozenset[str]()
    for stage in (experts, layers):
        some = [names for names in stage if names]
        for count in range(1, len(some) + 1):
            yield before.union(*(some[at * len(some) // count] for at in range(count)))
        before = before.union(*some)
