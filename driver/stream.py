"""Streams, and events that mark points in them."""

from __future__ import annotations

from typing import Any

from urdir.driver.context import OpenDevice, Owned
from urdir.driver.errors import DriverError, check


class Stream(Owned):
    """A queue of device work, run in order.

    Created with CU_STREAM_DEFAULT: copies without a stream are ordered with its work, so that a
    plain ``download()`` sees what was launched before it.
    """

    kind = "stream"

    def __init__(self, device: OpenDevice, name: str = "stream") -> None:
        device.context.make_current()
        api = device.api
        flags = int(api.CUstream_flags.CU_STREAM_DEFAULT)
        super().__init__(device, name, check(api, api.cuStreamCreate(flags), "cuStreamCreate"))

    def synchronize(self) -> None:
        """Wait until all work queued so far is done. Raises CudaError when a kernel faulted."""
        api = self._enter()
        check(api, api.cuStreamSynchronize(self.handle), f"cuStreamSynchronize on {self.name!r}")

    def record(self, event: Event | None = None) -> Event:
        """Mark this point of the queue with ``event`` (a new one by default), and return it. Raises
        CudaError."""
        api = self._enter()
        recorded = Event(self.device) if event is None else event
        try:
            result = api.cuEventRecord(recorded.handle, self.handle)
            check(api, result, f"cuEventRecord on {self.name!r}")
        except DriverError:
            if event is None:
                recorded.finish(quiet=True)
            raise
        return recorded

    def wait(self, event: Event) -> None:
        """Let later work of this stream start only after ``event``. Raises CudaError."""
        api = self._enter()
        what = f"cuStreamWaitEvent on {self.name!r}"
        check(api, api.cuStreamWaitEvent(self.handle, event.handle, 0), what)

    def _enter(self) -> Any:
        _ = self.handle
        self.device.context.make_current()
        return self.device.api

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuStreamDestroy(handle)


class Event(Owned):
    """A point in a stream, with a time stamp: ``end.elapsed_ms_since(start)``."""

    kind = "event"

    def __init__(self, device: OpenDevice, name: str = "event") -> None:
        device.context.make_current()
        api = device.api
        flags = int(api.CUevent_flags.CU_EVENT_DEFAULT)
        super().__init__(device, name, check(api, api.cuEventCreate(flags), "cuEventCreate"))

    def synchronize(self) -> None:
        """Wait until the device has passed this point. Raises CudaError when a kernel faulted."""
        self.device.context.make_current()
        api = self.device.api
        check(api, api.cuEventSynchronize(self.handle), "cuEventSynchronize")

    @property
    def is_done(self) -> bool:
        """Whether the device has passed this point; does not wait. Raises CudaError."""
        self.device.context.make_current()
        api = self.device.api
        status = api.cuEventQuery(self.handle)[0]
        if status == api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(api, (status,), "cuEventQuery")
        return True

    def elapsed_ms_since(self, earlier: Event) -> float:
        """Milliseconds of device time between two recorded events, waiting for this one. Raises
        CudaError for one that no stream has recorded."""
        self.synchronize()
        api = self.device.api
        result = api.cuEventElapsedTime(earlier.handle, self.handle)
        return float(check(api, result, "cuEventElapsedTime"))

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuEventDestroy(handle)
