"""A device that is reopened after a fault, so that work can continue."""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path

from urdir.driver.context import Closing
from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.ptx_files import PtxFiles


class DeviceOwner(Closing):
    """Owns the device of a name, opened at first use as by `Device.open`, and reopened after a
    fault, which makes a context unusable. A context manager.
    """

    def __init__(
        self, name: str, *, cache_folder: Path | None = None, ptx_files: PtxFiles | None = None
    ) -> None:
        self._name = name
        self._open = functools.partial(Device.open, cache_folder=cache_folder, ptx_files=ptx_files)
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """The device, ready for work. Raises as `Device.open`."""
        if self._device is not None and self._device.api.poisoned_by is not None:
            self.close()
        if self._device is None:
            self._device = self._open(self._name)
            self._name = self._device.name  # reopen the same kind
        return self._device

    def close(self) -> None:
        """Close the device. Idempotent."""
        device, self._device = self._device, None
        if device is not None:
            with suppress(CudaError):  # the context may be lost after a fault
                device.close()
