"""A device that plans can be built for and nothing can run on: addresses without memory."""

from __future__ import annotations

import itertools
from typing import Any

from urdir.driver import bindings
from urdir.driver.device import Device
from urdir.driver.device_name import DeviceName
from urdir.driver.errors import DeviceNameError
from urdir.model.errors import ModelError

_FIRST_ADDRESS = 1 << 44
_SPACING = 1 << 42  # larger than any allocation: they never meet


class _PaperApi:
    """An emulated driver whose device memory is addresses only: what is written is dropped."""

    def __init__(self, target: str, sm_count: int) -> None:
        self._driver = bindings.emulated(target, sm_count=sm_count)
        self._addresses = itertools.count(_FIRST_ADDRESS, _SPACING)
        done = (self._driver.CUresult.CUDA_SUCCESS,)
        for name in ("cuMemFree", "cuMemsetD8", "cuMemcpyHtoD"):
            setattr(self, name, lambda *_: done)
        self.cuMemAlloc = lambda _: (*done, next(self._addresses))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def paper_device(target: str, sm_count: int) -> Device:
    """A device that poses as ``target`` with ``sm_count`` SMs, for plans that never run.

    Its memory has no bounds and costs nothing. Raises ModelError for a target that no device has.
    """
    try:
        name = DeviceName.parse(f"emulator:{target}")
    except DeviceNameError as exc:
        raise ModelError(f"plans cannot be built for {target}: {exc}") from exc
    api = _PaperApi(target, sm_count)
    api.cuInit(0)
    return Device(api, name)
