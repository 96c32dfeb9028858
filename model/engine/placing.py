"""Where the matrices of a model lie: on the device, or in host memory."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    units,
    with_streaming,
)
from urdir.model.families.stored import stored_in
from urdir.model.memory.layer_files import READER_BYTES
from urdir.model.memory.streamed import check_host, host_room
from urdir.model.memory.weight_sizes import shares_of, streamed_nbytes, weight_sizes

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.engine.options import EngineOptions
    from urdir.model.families.config import Config
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.session_settings import SessionSettings, Split

#: Of many users' sequences, this many have room for a whole context beside weights that fit.
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

    Each of several ``devices`` streams what it has a share of; what is chosen fits all of them.
    Raises ModelError for too little host memory.
    """
    for device in devices:
        device.limit_memory(options.device_memory)
    config = replace(config, random_routing=options.random_routing)
    placement = options.placement or Placement()
    names = placement.on_host(config)
    ranks = Ranks(file, devices, options.split)
    room = partial(ranks.room, config, options, with_draft)
    if placement.fit:
        host = host_room(options.host_memory)
        names = fitting_names(ranks, config, names, room(), placement.expert_slots, host)
    if not names:
        return config
    slots = placement.expert_slots
    if slots is None:
        slots = _fitting_slots(ranks, config, names, room())
    config = with_streaming(config, names, slots)
    return with_files(ranks, config, host_room(options.host_memory), options.stream_dir is not None)


def with_files(ranks: Ranks, config: Config, room: int | None, has_folder: bool) -> Config:
    """The description with as many layers in files as are needed for the others to fit ``room``
    bytes of host memory (None: all fit); layers are chosen evenly. Raises ModelError where that is
    needed and there is no folder for them, UnsupportedError for several devices that work together
    on each layer."""
    needed = ranks.host_nbytes(config)
    if room is None or needed <= room or not has_folder:
        check_host(needed, room)
        return config
    if len(ranks.devices) > 1 and ranks.split == "tensors":
        raise UnsupportedError(
            f"{needed:,} bytes of weights would be streamed from host memory, which has {room:,}: "
            f"{len(ranks.devices)} GPUs with parts of all layers do not read them from files, "
            "split the model by layers"
        )
    layers = [{of.name for of in unit} for unit in units(config)]
    assert config.streaming is not None
    streaming = config.streaming
    choices = [
        replace(config, streaming=replace(streaming, in_files=frozenset().union(*some)))
        for count in range(1, len(layers) + 1)
        if (some := [layers[at * len(layers) // count] for at in range(count)])
    ]
    left = max(0, room - 2 * READER_BYTES * len(ranks.devices))
    fits = bisect_left(choices, True, key=lambda of: ranks.host_nbytes(of) <= left)
    return choices[min(fits, len(choices) - 1)]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The devices among which a model is split."""

    file: ModelFile
    devices: Sequence[Device]
    split: Split = "tensors"

    def shares(self, config: Config) -> list[Config]:
        """The description for each device."""
        return shares_of(config, self.file, len(self.devices), self.split)

    def room(
        self,
        config: Config,
        options: EngineOptions,
        with_draft: Callable[[SessionSettings], SessionSettings],
    ) -> list[float]:
        """Bytes of each device that a session as it is wanted leaves to weights."""
        pairs = zip(self.shares(config), self.devices, strict=True)
        places = (Place(self.file, share, device) for share, device in pairs)
        return [_room(place, options, with_draft) for place in places]

    def host_nbytes(self, config: Config) -> int:
        """Bytes of host memory of all devices' weights."""
        shares = self.shares(config)
        return sum(streamed_nbytes(self.file, share, in_files=False) for share in shares)

    def nbytes(self, config: Config) -> list[int]:
        """Bytes of each device's weights."""
        return [sum(weight_sizes(self.file, of).values()) for of in self.shares(config)]

    def fit(self, config: Config, room: Sequence[float]) -> bool:
        """Whether the weights of each device fit its ``room``."""
        return all(of <= left for of, left in zip(self.nbytes(config), room, strict=True))


def _room(
    place: Place,
    options: EngineOptions,
    with_draft: Callable[[SessionSettings], SessionSettings],
) -> float:
    """Bytes of a device that a session as it is wanted leaves to weights; of many users', some
    sequences have room for a whole context."""
    context = options.chosen_context(place.config)
    streaming = with_streaming(place.config, streamable(place.config))
    session = with_draft(options.session(streaming, place.device, context))
    if session.page_len:
        session = replace(session, shared_states=0 if options.memory_share else None)
        whole = (place.least_pages(session) or 1) * min(_WHOLE_SEQUENCES, session.sequences)
        session = replace(session, pages=session.pages or whole)
    beside = place.plan(session).total - sum(weight_sizes(place.file, place.config).values())
    free = (options.memory_share or 1.0) * place.device.usable_memory()
    return free - RESERVE_BYTES - beside


def fitting_names(
    ranks: Ranks,
    config: Config,
    names: frozenset[str],
    room: Sequence[float],
    slots: int | None = None,
    host: int | None = None,
) -> frozenset[str]:
    """The tensors that lie in host memory where the others have ``room`` bytes of each device:
    ``names``, and as few more as are needed.

    Of a mixture these are the experts of all layers, or of as many as ``host`` bytes hold (None:
    all). The rest of the room is for caches, of at least ``slots`` experts a layer (None: those of
    a row), and a token copies what they lack. Layers come next, chosen evenly, so that the link is
    busy all the time. Without room for caches experts are chosen like layers.
    """

    streamed = partial(with_streaming, config)

    def fits(choice: frozenset[str], slots: int = 0) -> bool:
        return ranks.fit(streamed(choice, slots), room)

    if fits(names):  # few layers may need more: they have as many slots
        return names
    can = streamable(config)
    layers = [frozenset(of.name for of in stored_in(layer)) & can for layer in config.layers]
    experts = [frozenset(n for n in names if re.search(EXPERTS, n)) for names in layers]
    every = frozenset[str]().union(*experts)
    some = [names | more for more in _more(frozenset(), experts)]
    more = [names | more for more in _more(every, layers)] or [names]
    least = _most_used(config) if slots is None else slots
    if some and least and fits(some[-1], least):

        def exceeds(choice: frozenset[str]) -> bool:
            return host is not None and ranks.host_nbytes(streamed(choice)) > host

        first = bisect_left(some, True, key=partial(fits, slots=least))
        last = bisect_left(some, True, key=exceeds) - 1
        # others are chosen of more layers, whose bytes may be fewer
        most = (some[at] for at in range(last, first, -1) if fits(some[at], least))
        return next(most, some[first])
    if every and least and fits(more[-1], least):
        return more[bisect_left(more, True, key=partial(fits, slots=least))]
    some += more
    if (at := bisect_left(some, True, key=fits)) < len(some):
        return some[at]
    # nothing fits: slots may take more than the few layers whose turns they are for
    return min((some[-1], names), key=lambda of: max(ranks.nbytes(streamed(of))))


def _more(before: frozenset[str], parts: Sequence[frozenset[str]]) -> Iterator[frozenset[str]]:
    """More and more of some parts, evenly."""
    some = [names for names in parts if names]
    for count in range(1, len(some) + 1):
        yield before.union(*(some[at * len(some) // count] for at in range(count)))


def _most_used(config: Config) -> int:
    """Experts of a layer that a row uses."""
    found = (of for layer in config.layers for of in layer.mixtures)
    return max((of.router.used for of in found), default=0)


def _fitting_slots(
    ranks: Ranks, config: Config, names: frozenset[str], room: Sequence[float]
) -> int:
    """The most experts of a layer whose caches fit ``room`` bytes beside the weights; 0 where those
    of a row do not."""
    mixtures = cached_mixtures(with_streaming(config, names, 1))
    most = max((of.router.experts for of in mixtures), default=0)
    least = max((of.router.used for of in mixtures), default=0)

    def exceeds(slots: int) -> bool:
        return not ranks.fit(with_streaming(config, names, slots), room)

    slots = bisect_left(range(1, most + 1), True, key=exceeds)
    return slots if slots >= least else 0
