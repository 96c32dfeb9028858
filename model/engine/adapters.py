"""The LoRA adapters of a session: which are loaded, and which are in slots on the device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from urdir.model.errors import BusyError, SettingsError
from urdir.model.memory.adapter_slots import write_slot

if TYPE_CHECKING:
    from urdir.model.files.low_rank import Adapter
    from urdir.model.memory.weights import Weights

#: Names of adapters with their scales.
Choice = tuple[tuple[str, float], ...]
#: The largest scale: that of a sequence is an f32 number on the device.
MOST_SCALE = float(np.finfo(np.float32).max)
#: After how many seconds to ask again for a slot.
RETRY_AFTER = 1.0


class AdapterPlace(NamedTuple):
    """Where the adapters of a sequence are: a slot from 1 on (0: none), and their scale."""

    slot: int = 0
    scale: float = 1.0


class AdapterScale(NamedTuple):
    """An adapter, its file, and its scale in requests that name none."""

    name: str
    path: str
    scale: float


def adapter_names(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The names of adapters that are given together: those of their files, with a number where two
    are the same."""
    names: list[str] = []
    for path in paths:
        name, number = Path(path).absolute().name.removesuffix(".gguf"), 1
        stem = name
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter under its name; ``number`` is that of no other one, ever."""

    adapter: Adapter
    number: int


@dataclass(slots=True)
class _Slot:
    """What lies in a slot: numbers of adapters with their scales, and how many answers use it."""

    key: Choice = ()
    users: int = 0
    used_at: int = 0


@dataclass(slots=True)
class Adapters:
    """Adapters by name, and their places beside ``weights``, of all ranks.

    One adapter takes a slot for any scale; several together take one for each combination. A slot
    belongs to its answers until they end, and keeps its contents until another one needs it.
    ``default`` are the adapters of requests that name none.
    """

    weights: Sequence[Weights]
    default: Choice = ()
    _loaded: dict[str, _Loaded] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _last: int = 0

    def __post_init__(self) -> None:
        room = self.weights[0].config.adapters
        assert room is not None
        self._slots = [_Slot() for _ in range(room.slots)]

    @property
    def names(self) -> Mapping[str, Adapter]:
        """The loaded adapters by name, oldest first."""
        return {name: of.adapter for name, of in [*self._loaded.items()]}

    def add(self, name: str, adapter: Adapter) -> None:
        """Load an adapter under a name, which no other one has. Raises SettingsError."""
        if not name or name in self._loaded:
            raise SettingsError(f"an adapter {name!r} is loaded: choose another name")
        room = self.weights[0].config.adapters
        assert room is not None
        if more := sorted(set(adapter.matrices) - room.names):
            raise SettingsError(
                f"{adapter.path}: no room for adapters of tensor '{more[0]}': open the model with "
                "such an adapter"
            )
        if adapter.rank > room.rank:
            raise SettingsError(
                f"{adapter.path}: rank {adapter.rank}: there is room for {room.rank}: open the "
                "model with a higher max_adapter_rank"
            )
        self._last += 1
        self._loaded[name] = _Loaded(adapter, self._last)

    def scales(self) -> tuple[AdapterScale, ...]:
        """The loaded adapters in order, with their scales in requests that name none."""
        chosen = dict(self.default)
        return tuple(
            AdapterScale(name, str(of.adapter.path), chosen.get(name, 0.0))
            for name, of in [*self._loaded.items()]
        )

    def set_scales(self, scales: Mapping[int, float]) -> None:
        """Choose the scales of requests that name no adapters, by place; 0 of the others. Raises
        SettingsError for a place that none has, and for a scale that is no number."""
        names = [*self._loaded]
        for place, scale in scales.items():
            if not 0 <= place < len(names):
                raise SettingsError(f"no adapter {place}: {len(names)} are loaded")
            _check_scale(names[place], scale)
        self.default = tuple((names[place], scale) for place, scale in scales.items() if scale)

    def load_all(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Load adapters, each under its file's name (and a number, if another has that), for all
        requests that name none."""
        names = adapter_names([adapter.path for adapter, _ in adapters])
        for name, (adapter, scale) in zip(names, adapters, strict=True):
            self.add(name, adapter)
            self.default += ((name, scale),)

    def remove(self, name: str) -> None:
        """Forget an adapter; answers that use it go on. Raises SettingsError without it."""
        self._of(name)
        del self._loaded[name]
        self.default = tuple(each for each in self.default if each[0] != name)

    def chosen(self, choice: Sequence[tuple[str, float]] | None) -> Choice:
        """The adapters of a request, with numbers in place of names; the ``default`` ones for None.
        Raises SettingsError for an unknown name, and for a scale that is no number."""
        scales: dict[str, float] = {}
        for name, scale in self.default if choice is None else choice:
            number = str(self._of(name).number)
            scales[number] = scales.get(number, 0.0) + scale
            _check_scale(name, scales[number])
        return tuple((number, scale) for number, scale in sorted(scales.items()) if scale)

    @staticmethod
    def scope(scope: bytes, chosen: Choice) -> bytes:
        """The scope within which requests with these adapters share prefixes."""
        if not chosen:
            return scope
        return blake2b(repr((scope, chosen)).encode(), digest_size=32).digest()

    def take(self, chosen: Choice) -> AdapterPlace:
        """A place of adapters, written if it is new, until it is given back.

        Raises BusyError where every slot is in use, SettingsError for an adapter that was removed,
        ConfigError for ranks that do not fit together.
        """
        if not chosen:
            return AdapterPlace()
        (_, scale), *others = chosen
        key = chosen if others else ((chosen[0][0], 1.0),)
        number = self._slot_of(key)
        slot = self._slots[number]
        slot.users += 1
        self._last += 1
        slot.used_at = self._last
        return AdapterPlace(number + 1, 1.0 if others else scale)

    def give_back(self, place: AdapterPlace) -> None:
        """An answer has ended."""
        if place.slot:
            self._slots[place.slot - 1].users -= 1

    def _slot_of(self, key: Choice) -> int:
        """The slot that has these, written if none has."""
        for number, slot in enumerate(self._slots):
            if slot.key == key:
                return number
        free = [number for number, slot in enumerate(self._slots) if not slot.users]
        if not free:
            raise BusyError(
                f"all {len(self._slots)} slots for adapters are in use: try again later, or open "
                "the model with more (max_loras)",
                RETRY_AFTER,
            )
        number = min(free, key=lambda number: self._slots[number].used_at)
        self._slots[number].key = ()  # until all ranks have it
        loaded = [*self._loaded.values()]  # at once: other threads load and unload
        by_number = {str(of.number): of.adapter for of in loaded}
        if any(of not in by_number for of, _ in key):
            raise SettingsError("the adapter of the request was removed")
        adapters = [(by_number[of].matrices, scale) for of, scale in key]
        for weights in self.weights:
            write_slot(weights, number, adapters)
        self._slots[number].key = key
        return number

    def _of(self, name: str) -> _Loaded:
        found = self._loaded.get(name)
        if found is None:
            known = ", ".join(self._loaded) or "none is loaded"
            raise SettingsError(f"no adapter {name!r}: {known}")
        return found


def _check_scale(name: str, scale: float) -> None:
    """Raise SettingsError unless the device takes a scale."""
    if not abs(scale) <= MOST_SCALE:
        raise SettingsError(
            f"adapter {name!r} times {scale}: expected a number of up to {MOST_SCALE:.3g}"
        )
