"""A device that is opened again after a fault, for work that goes on with what comes next."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Self

from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.ptx_files import PtxFiles


class DeviceOwner:
    """The device of that name, opened when first asked for, as `Device.open` does; a new one after
    a fault, which leaves a context unusable. A context manager.
    """

    def __init__(
        self, name: str, *, cache_folder: Path | None = None, ptx_files: PtxFiles | None = None
    ) -> None:
        self._name = name
        self._open = functools.partial(Device.open, cache_folder=cache_folder, ptx_files=ptx_files)
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """The device, in a state to work. Raises what opening it raises."""
        if self._device is not None and self._device.api.poisoned_by is not None:
            self.close()
        if self._device is None:
            self._device = self._open(self._name)
            self._name = self._device.name  # the next one is of the same kind
        return self._device

    def close(self) -> None:
        """Close the device; again is harmless."""
        device, self._device = self._device, None
        if device is not None:
            with suppress(CudaError):  # of a context that a fault has ended already
                device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
