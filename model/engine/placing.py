"""Where the matrices of a model lie: on the device, or in host memory."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.budget import RESERVE_BYTES
from urdir.model.engine.fitting import Place
from urdir.model.errors import UnsupportedError
from urdir.model.families.placement import EXPERTS, Placement, streamable, with_streaming
from urdir.model.families.stored import stored_in
from urdir.model.memory.streamed import check_host
from urdir.model.memory.weights import streamed_nbytes, weight_sizes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.options import EngineOptions
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings

#: Of many users' sequences, so many have room for a whole context beside weights that are chosen to
#: fit.
_WHOLE_SEQUENCES = 4


def placed(
    config: Config, file: ModelFile, devices: Sequence[Device], options: EngineOptions
) -> Config:
    """The description with the matrices in host memory that ``options.placement`` says; of each
    device no more memory than these permit is used from now on. Raises
    ModelError for too little host memory, UnsupportedError for several ``devices``."""
    for device in devices:
        device.limit_memory(options.device_memory)
    placement = options.placement or Placement()
    names = placement.on_host(config)
    if placement.fit:
        session = options.session(config, devices[0], options.chosen_context(config))
        if options.memory_share:
            session = replace(session, pages=None, shared_states=0)
        share = options.memory_share or 1.0
        names = fitting_names(Place(file, config, devices[0]), session, names, share)
    config = with_streaming(config, names)
    if config.streaming is None:
        return config
    if len(devices) > 1:
        raise UnsupportedError(
            f"weights in host memory for {len(devices)} GPUs are not supported: leave all on the "
            "GPUs"
        )
    check_host(streamed_nbytes(file, config))
    return config


def fitting_names(
    place: Place, session: SessionSettings, names: frozenset[str], share: float = 1.0
) -> frozenset[str]:
    """The tensors that lie in host memory where all else fits a ``share`` of a device's memory:
    ``names``, and as few more as are needed. Experts come first, as few of them are used at a time;
    layers are chosen evenly, so that the link is busy all the time."""
    most = session
    if session.page_len:
        pages = place.least_pages(replace(session, pages=None)) or 1
        most = replace(
            session, pages=session.pages or pages * min(_WHOLE_SEQUENCES, session.sequences)
        )
    beside = place.plan(most).total - _weights(place, place.config)
    free = share * place.device.usable_memory() - RESERVE_BYTES - beside
    choices = [names, *(names | more for more in _choices(place.config))]

    def fits(choice: frozenset[str]) -> bool:
        return _weights(place, with_streaming(place.config, choice)) <= free

    return choices[min(bisect_left(choices, True, key=fits), len(choices) - 1)]


def _weights(place: Place, config: Config) -> int:
    return sum(weight_sizes(place.file, config).values())


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
