"""The LoRA adapters of a session: which are loaded, and which are in slots on the device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from urdir.model.errors import BusyError, SettingsError
from urdir.model.memory.adapter_slots import write_slot

if TYPE_CHECKING:
    from urdir.model.engine.adapter_pool import AdapterPool, Stamp
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


@dataclass(slots=True)
class _Known:
    """An adapter under its name; ``number`` is that of no other one, ever. One of a pool has a
    ``stamp`` of its file, and may be out of host memory (None)."""

    path: Path
    number: int
    adapter: Adapter | None
    stamp: Stamp | None = None
    used_at: int = 0


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
    ``default`` are the adapters of requests that name none. Those of a ``pool`` are read when a
    request names them; the least recently used leave host memory. Choosing, loading and unloading
    may come from any thread.
    """

    weights: Sequence[Weights]
    default: Choice = ()
    pool: AdapterPool | None = None
    _known: dict[str, _Known] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)
    _last: int = 0
    _lock: RLock = field(default_factory=RLock)

    def __post_init__(self) -> None:
        room = self.weights[0].config.adapters
        assert room is not None
        self._slots = [_Slot() for _ in range(room.slots)]

    @property
    def names(self) -> Mapping[str, Adapter]:
        """The adapters in host memory by name, oldest first."""
        known = [*self._known.items()]
        return {name: adapter for name, of in known if (adapter := of.adapter) is not None}

    def known_names(self) -> tuple[str, ...]:
        """Names that requests may have: of loaded adapters, then of the pool's others."""
        others = () if self.pool is None else self.pool.names()
        return tuple(dict.fromkeys((*self._known, *others)))

    def add(self, name: str, adapter: Adapter) -> None:
        """Load an adapter under a name, which no other one has. Raises SettingsError."""
        self._check(adapter)
        with self._lock:
            if not name or name in self._known:
                raise SettingsError(f"an adapter {name!r} is loaded: choose another name")
            self._known[name] = _Known(Path(adapter.path), self._next(), adapter)

    def _check(self, adapter: Adapter) -> None:
        """Raise SettingsError for an adapter without room."""
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

    def _next(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def scales(self) -> tuple[AdapterScale, ...]:
        """The loaded adapters in order, with their scales in requests that name none."""
        chosen = dict(self.default)
        return tuple(
            AdapterScale(name, str(of.path), chosen.get(name, 0.0))
            for name, of in [*self._known.items()]
        )

    def set_scales(self, scales: Mapping[int, float]) -> None:
        """Choose the scales of requests that name no adapters, by place; 0 of the others. Raises
        SettingsError for a place that none has, and for a scale that is no number."""
        names = [*self._known]
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
            _check_scale(name, scale)
            self.add(name, adapter)
            self.default += ((name, scale),)

    def remove(self, name: str) -> None:
        """Forget an adapter; answers that use it go on. Raises SettingsError without it."""
        with self._lock:
            self._of(name)
            del self._known[name]
        self.default = tuple(each for each in self.default if each[0] != name)

    def chosen(self, choice: Sequence[tuple[str, float]] | None) -> Choice:
        """The adapters of a request, with numbers in place of names; the ``default`` ones for None.
        Those of a pool are read, unless a slot has them. Raises SettingsError for an unknown name,
        and for a scale that is no number, ModelError for a file."""
        scales: dict[str, float] = {}
        for name, scale in self.default if choice is None else choice:
            known = self._of(name)
            number = str(known.number)
            scales[number] = scales.get(number, 0.0) + scale
            _check_scale(name, scales[number])
            if scale and not any(number in dict(slot.key) for slot in self._slots):
                self._read(known)
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
        slot.used_at = self._next()
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
        known = [*self._known.values()]  # at once: other threads load and unload
        by_number = {str(of.number): of for of in known}
        if any(of not in by_number for of, _ in key):
            raise SettingsError("the adapter of the request was removed")
        adapters = [(self._read(by_number[of]).matrices, scale) for of, scale in key]
        for weights in self.weights:
            write_slot(weights, number, adapters)
        self._slots[number].key = key
        return number

    def _of(self, name: str) -> _Known:
        """An adapter; one of the pool has another number once its file has changed."""
        with self._lock:
            found, pool = self._known.get(name), self.pool
            is_here = found is not None and (found.stamp is None or found.adapter is not None)
            if pool is not None and not is_here and (path := pool.find(name)) is not None:
                stamp = pool.stamp(path)
                if found is None or found.stamp != stamp:
                    found = self._known[name] = _Known(path, self._next(), None, stamp)
                is_here = True
        if found is None or not is_here:
            known = ", ".join(self._known) or "none is loaded"
            raise SettingsError(f"no adapter {name!r}: {known}")
        return found

    def _read(self, known: _Known) -> Adapter:
        """An adapter in host memory; of a pool the least recently used ones leave it. Raises
        ModelError."""
        if known.stamp is None or (pool := self.pool) is None:
            assert known.adapter is not None
            return known.adapter
        if (adapter := known.adapter) is None:
            with self._lock:
                if (adapter := known.adapter) is None:
                    adapter = pool.read(known.path)
                    self._check(adapter)
                    known.adapter = adapter
        known.used_at = self._next()
        with self._lock:
            here = [of for of in self._known.values() if of.stamp and of.adapter is not None]
            here.sort(key=lambda of: of.used_at)
            for of in here[: 0 if pool.most is None else max(0, len(here) - pool.most)]:
                of.adapter = None
        return adapter


def _check_scale(name: str, scale: float) -> None:
    """Raise SettingsError unless the device takes a scale."""
    if not abs(scale) <= MOST_SCALE:
        raise SettingsError(
            f"adapter {name!r} times {scale}: expected a number of up to {MOST_SCALE:.3g}"
        )
