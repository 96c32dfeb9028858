"""Groups of devices that access each other's memory.

A rank is the number of a device in its group, from 0. Joint work is a plan per rank, recorded as a
graph per rank; their kernels wait for each other on flags in peer memory. So all graphs are made
before the first is launched, and the graphs of a step are launched in direct succession, without
waiting in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, overload

from urdir.driver.context import Closing, close_all
from urdir.driver.device import Device, find_devices
from urdir.driver.errors import CudaError, DeviceNameError, DriverError, GroupError
from urdir.driver.graph import RecordedGraph
from urdir.driver.ptx_files import PtxFiles
from urdir.driver.recorded_parts import RecordedParts
from urdir.driver.stream import Stream


class Group(Closing, Sequence[Device]):
    """Opened devices by rank, with peer access between any two; a context manager. A single device
    is a group too.

    A fault on one rank makes all unusable: the call that reports it raises CudaError with the state
    of every rank, and later calls on any of them raise GroupError. The same happens if a launch is
    refused on one rank after others have begun theirs (`launch_together`). ``notes`` add to that
    message what kernels left in page-locked memory.
    """

    def __init__(self, ranks: Sequence[Device]) -> None:
        self._ranks = tuple(ranks)
        self.notes: list[Callable[[], str]] = []
        for device in self._ranks if len(self._ranks) > 1 else ():
            device.api.explain_fault = self._explain
            device.context.join_group([d.context for d in self._ranks if d is not device])

    @classmethod
    def open(
        cls,
        name: str = "auto",
        gpus: int | Sequence[int] | None = 2,
        *,
        api: Any = None,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        ptx_files: PtxFiles | None = None,
    ) -> Self:
        """Open ``gpus`` devices, or those with these ordinals, of ``auto``, ``cuda`` or
        ``emulator[:sm_NN]``; None: the device that `Device.open` opens.

        Raises DeviceNameError for invalid ordinals, DriverError without peer access, and as
        `Device.open`; nothing stays open then.
        """
        found = find_devices(name, None if gpus is None else _ordinals(gpus), api)
        ranks: list[Device] = []
        try:
            for each in found.names:
                ranks.append(
                    Device(found.api, each, cache_folder, cache_limit, found.note, ptx_files)
                )
            return cls(ranks)
        except BaseException:
            for device in ranks:
                with suppress(DriverError):
                    device.close()
            raise

    @overload
    def __getitem__(self, rank: int) -> Device: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Device, ...]: ...
    def __getitem__(self, rank: int | slice) -> Device | tuple[Device, ...]:
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._ranks)

    def synchronize(self) -> None:
        """Wait for all work of all ranks. Raises CudaError, GroupError."""
        for device in self._ranks:
            device.synchronize()

    def _explain(self) -> str:
        """The state of each rank after a fault of one; kernels that wait for it end soon."""
        api = self._ranks[0].api
        former = api.cuCtxGetCurrent()
        lines = []
        for rank, device in enumerate(self._ranks):
            status = api.cuCtxSetCurrent(device.context.handle)[0]
            status = int(status) or int(api.cuCtxSynchronize()[0])
            state = api.CUresult(status).name if status else "no fault of its own"
            lines.append(f"\nrank {rank}, {device.name}: {state}")
        if not int(former[0]):
            api.cuCtxSetCurrent(former[1])
        return "".join(lines) + "".join(f"\n{text}" for note in self.notes if (text := note()))

    def close(self) -> None:
        """Close all devices. Idempotent."""
        close_all(self._ranks[::-1])


def launch_together(graphs: Sequence[tuple[RecordedGraph | RecordedParts, Stream]]) -> None:
    """Queue one run of each rank's graph, each on its own stream.

    Raises LifetimeError for a closed graph, and CudaError if the first is refused: nothing is
    queued then. If a later one is refused, the other ranks would wait for it, so the group becomes
    unusable: GroupError, once their kernels have ended.
    """
    for graph, stream in graphs:
        _ = graph.handle, stream.handle
    for rank, (graph, stream) in enumerate(graphs):
        try:
            graph.launch(stream)
        except CudaError as error:
            api = graph.device.api
            if not rank or api.poisoned_by is not None:
                raise
            api.poisoned_by = error
            raise GroupError(
                f"rank {rank} was refused a step that others have begun: close the group. {error}"
                + api.explain_fault()
            ) from error


def _ordinals(gpus: int | Sequence[int]) -> tuple[int, ...]:
    ordinals = tuple(range(gpus)) if isinstance(gpus, int) else tuple(gpus)
    if not ordinals or min(ordinals) < 0 or len({*ordinals}) != len(ordinals):
        raise DeviceNameError(
            f"gpus {gpus}: give a number of GPUs, or the ordinals of different ones"
        )
    return ordinals
