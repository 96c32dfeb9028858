"""Sanitizer between devices: unordered accesses of two devices to the same memory.

Two accesses of one address by different devices, one of them a write, are a race unless both are
strong operations, or the later device knows of the earlier access. It learns of all past work of
another device when it acquires what that one released (or reads it strongly, then fences), when its
work waits for an event of the other's, or when it is queued after the host waited for the other's.
All of a device counts as one thread: races can be missed, but reported ones are real. Copies and
fills are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import KernelFault
from urdir.driver.emulator.machine.memory import Allocation
from urdir.driver.emulator.machine.watch import Access

Stamps = npt.NDArray[np.int64]

_RELEASES = frozenset(("release", "acq_rel"))
_ACQUIRES = frozenset(("acquire", "acq_rel"))
_UNIT = 2  # four bytes
_DEVICE, _STRONG = 48, 47
_EPOCH = (1 << _STRONG) - 1


@dataclass(slots=True)
class _Shadow:
    """The last write and read of every unit: device + 1, strong, epoch, and the access's number."""

    writes: Stamps
    reads: Stamps
    writers: npt.NDArray[np.int32]
    readers: npt.NDArray[np.int32]

    @classmethod
    def of(cls, nbytes: int) -> _Shadow:
        """An untouched shadow, which costs nothing until touched."""
        units = -(-nbytes >> _UNIT) + 1
        return cls(
            np.zeros(units, np.int64),
            np.zeros(units, np.int64),
            np.zeros(units, np.int32),
            np.zeros(units, np.int32),
        )


class DeviceOrder:
    """The knowledge that each device, and the host, has of the others' work."""

    def __init__(self, devices: int) -> None:
        self._now = np.ones(devices, np.int64)
        self._known = np.zeros((devices, devices), np.int64)
        self._host = np.zeros(devices, np.int64)
        #: By address; per device: what a strong write publishes, what a fence will acquire.
        self._released: dict[int, Stamps] = {}
        self._fenced: list[Stamps | None] = [None] * devices
        self._seen: list[Stamps | None] = [None] * devices
        self._shadows: dict[int, _Shadow] = {}
        self._places: list[str] = []
        self._place_numbers: dict[str, int] = {}

    # ---- work and the host ----

    def queued(self) -> Stamps:
        """The knowledge of work that is queued now."""
        return self._host.copy()

    def release(self, device: int) -> Stamps:
        """Everything that a device did and knows; later work is newer."""
        self._known[device, device] = self._now[device]
        self._now[device] += 1
        known: Stamps = self._known[device].copy()
        return known

    def acquire(self, device: int, known: Stamps) -> None:
        """A device learns."""
        np.maximum(self._known[device], known, out=self._known[device])

    def waited(self, known: Stamps) -> None:
        """The host learns."""
        np.maximum(self._host, known, out=self._host)

    # ---- accesses ----

    def fence(self, device: int) -> None:
        """Acquire what was read; publish what was done with the next write."""
        if (seen := self._seen[device]) is not None:
            self.acquire(device, seen)
            self._seen[device] = None
        self._fenced[device] = self.release(device)

    def touch(
        self,
        device: int,
        access: Access,
        allocation: Allocation,
        by: str,
        fault: Callable[[str], KernelFault],
    ) -> None:
        """Compare with earlier accesses of other devices, and record. ``by`` names the access."""
        shadow = self._shadows.get(allocation.address)
        if shadow is None:
            shadow = self._shadows[allocation.address] = _Shadow.of(allocation.nbytes)
        offset = (access.address - np.uint64(allocation.address)).astype(np.int64)
        if int(offset.max()) + (1 << access.shift) > allocation.nbytes:
            return  # the access itself is a fault
        steps = np.arange(max(1, 1 << access.shift >> _UNIT))
        units = ((offset >> _UNIT)[:, None] + steps).reshape(-1)
        is_strong = access.order != "weak"
        past = [(shadow.writes, shadow.writers)]
        if access.action != "load":
            past.append((shadow.reads, shadow.readers))
        for stamps, places in past:
            at = self._unordered(stamps[units], device, is_strong)
            if at is not None:
                unit = int(units[at])
                other = int(stamps[unit] >> _DEVICE) - 1
                raise fault(
                    f"race: {by} of device {device} and {self._places[places[unit]]} of device "
                    f"{other} touch global address 0x{allocation.address + (unit << _UNIT):x}, at "
                    f"offset {unit << _UNIT} of the {allocation}, with nothing to order them; "
                    "hint: what one device writes another may read after a release and an acquire "
                    "at .sys scope, after an event, or as one word with its own flag"
                )
        stamp = (device + 1) << _DEVICE | int(is_strong) << _STRONG | int(self._now[device])
        number = self._number(by)
        if access.action == "load":
            shadow.reads[units], shadow.readers[units] = stamp, number
        else:
            shadow.writes[units], shadow.writers[units] = stamp, number
        if is_strong:
            self._synchronise(device, access)

    def _unordered(self, past: Stamps, device: int, is_strong: bool) -> int | None:
        if not past.any():
            return None
        who = past >> _DEVICE
        suspects = (who != 0) & (who != device + 1)
        if is_strong:
            suspects &= (past >> _STRONG & 1) == 0
        at = np.flatnonzero(suspects)
        races = at[self._known[device, who[at] - 1] < (past[at] & _EPOCH)]
        return int(races[0]) if races.size else None

    def _synchronise(self, device: int, access: Access) -> None:
        """A strong operation acquires, or reads, what was released there; and releases."""
        places = access.address.tolist()
        if access.action != "store":
            for found in [self._released[at] for at in places if at in self._released]:
                if access.order in _ACQUIRES:
                    self.acquire(device, found)
                else:
                    seen = self._seen[device]
                    self._seen[device] = found if seen is None else np.maximum(seen, found)
        if access.action != "load":
            releases = access.order in _RELEASES
            given = self.release(device) if releases else self._fenced[device]
            if given is not None:
                self._released.update(dict.fromkeys(places, given))

    def _number(self, by: str) -> int:
        if by not in self._place_numbers:
            self._place_numbers[by] = len(self._places)
            self._places.append(by)
        return self._place_numbers[by]
