"""Primary context of a GPU, and lifetimes of the objects in it."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, Self

from urdir.driver.errors import DriverError, GroupError, LifetimeError, check, error_of
from urdir.driver.properties import DeviceProperties


class Context:
    """A retained primary context: made current by every public call, released once.

    ``ordinal`` is the driver's index of the GPU. Raises CudaError on failure.
    """

    def __init__(self, api: Any, ordinal: int, name: str) -> None:
        self.api = api
        self.name = name
        self._closed = True
        self._pid = os.getpid()
        self._owned: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._gpu = check(api, api.cuDeviceGet(ordinal), f"cuDeviceGet {ordinal}")
        what = f"cuDevicePrimaryCtxRetain on {name}"
        self._handle = check(api, api.cuDevicePrimaryCtxRetain(self._gpu), what)
        self._closed = False
        self._peers: set[Context] = set()
        self._in_group = False

    @property
    def gpu(self) -> Any:
        """The driver's device handle (CUdevice)."""
        return self._gpu

    @property
    def handle(self) -> Any:
        """The driver's context handle (CUcontext)."""
        return self._handle

    def join_group(self, peers: Iterable[Context]) -> None:
        """Enable access to the memory of ``peers`` for kernels and copies of this context. A fault
        of any of them also ends this context: they share one ``api``.

        Raises DriverError if the devices lack peer access, CudaError.
        """
        for peer in peers:
            what = f"cuDeviceCanAccessPeer of {self.name} to {peer.name}"
            if not check(self.api, self.api.cuDeviceCanAccessPeer(self._gpu, peer.gpu), what):
                raise DriverError(
                    f"{self.name} cannot reach the memory of {peer.name}: a group needs GPUs with "
                    'peer access, as "nvidia-smi topo -p2p r" shows'
                )
            self.make_current()
            what = f"cuCtxEnablePeerAccess of {self.name} to {peer.name}"
            result = self.api.cuCtxEnablePeerAccess(peer.handle, 0)
            # Another open group of this process may have the same primary contexts.
            if result[0] != self.api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                check(self.api, result, what)
            self._peers.add(peer)
        self._in_group = True

    def reaches(self, other: Context) -> bool:
        """Whether kernels of this context may access memory of another."""
        return other is self or other in self._peers

    @property
    def alive(self) -> bool:
        """False after close, in a forked child and at interpreter exit: no calls are allowed."""
        return not self._closed and os.getpid() == self._pid and not sys.is_finalizing()

    def make_current(self) -> None:
        """Make this the calling thread's context.

        It is always set, never cached: other code in this process may have changed it, and setting
        costs no more than querying. Raises LifetimeError if the context is closed or belongs to the
        parent of a forked process, GroupError if a device of its group has failed.
        """
        if self._closed:
            raise LifetimeError(f"device {self.name} is closed")
        if os.getpid() != self._pid:
            raise LifetimeError(
                f"device {self.name} was opened in process {self._pid} and cannot be used in its "
                f'forked child {os.getpid()}: open it in the child, and start children with "spawn"'
            )
        if self._in_group and (first := self.api.poisoned_by) is not None:
            raise GroupError(
                f"device {self.name} belongs to a group in which a device has failed: close the "
                f"group. The failure was {first}"
            )
        status = self.api.cuCtxSetCurrent(self._handle)[0]
        if status:
            raise error_of(self.api, status, f"cuCtxSetCurrent on {self.name}")

    def adopt(self, owned: Owned) -> None:
        """Register an object that must be closed before this context."""
        self._owned[next(self._numbers)] = owned  # threads may be loading kernels

    def destroy(self, call: Callable[[Any], Any], handle: Any, what: str, quiet: bool) -> None:
        """Run a destroying driver call with this context current, then restore the former one.

        (A finaliser may run between any two calls of any thread.) Does nothing if the context is
        gone; a poisoned context has already lost its objects. Raises CudaError for other failures
        unless ``quiet``; if this context cannot be made current, nothing is destroyed.
        """
        if not self.alive:
            return
        former = self.api.cuCtxGetCurrent()
        status = self.api.cuCtxSetCurrent(self._handle)[0]
        if int(status):
            what = f"cuCtxSetCurrent on {self.name} for {what}"
        else:
            status = call(handle)[0]
            if not int(former[0]):
                self.api.cuCtxSetCurrent(former[1])  # fails if its owner destroyed it
        self._report(status, what, quiet)

    def _report(self, status: Any, what: str, quiet: bool) -> None:
        if int(status):
            error = error_of(self.api, status, what)
            if not quiet and not error.sticky:
                raise error

    def close(self, quiet: bool = False) -> None:
        """Close all objects in the context, newest first, and release it."""
        if self.alive:
            for owned in [*self._owned.values()][::-1]:
                owned.finish(quiet=True)
            self._owned.clear()
            self._closed = True
            status = self.api.cuDevicePrimaryCtxRelease(self._gpu)[0]
            self._report(status, f"cuDevicePrimaryCtxRelease on {self.name}", quiet)
        self._closed = True


class OpenDevice(Protocol):
    """Interface of a device for the objects on it; implemented by `urdir.driver.device.Device`."""

    @property
    def api(self) -> Any:
        """The driver's functions, real or emulated (`urdir.driver.bindings`)."""

    @property
    def name(self) -> str:
        """The device string: "cuda:0", "emulator:sm_90"."""

    @property
    def target(self) -> str:
        """The target of portable kernels: "sm_90"."""

    @property
    def native_target(self) -> str:
        """The most specific target whose code runs here: "sm_90a" on an H200."""

    @property
    def is_emulated(self) -> bool:
        """Whether this is the emulator."""

    @property
    def context(self) -> Context:
        """The context of all objects on the device."""

    @property
    def properties(self) -> DeviceProperties:
        """Properties and limits of the device."""

    def memory_info(self) -> tuple[int, int]:
        """Current (free, total) bytes of device memory."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""


class Closeable(Protocol):
    """An object that `close_all` can close."""

    def close(self) -> None:
        """Close it; DriverError on failure."""


def close_all(items: Iterable[Closeable]) -> None:
    """Close all items even if some fail; raise the first failure."""
    first: DriverError | None = None
    for item in items:
        try:
            item.close()
        except DriverError as error:
            first = first or error
    if first is not None:
        raise first


class Closing:
    """A context manager that closes itself; ``close`` may come twice."""

    def close(self) -> None:
        """Close it; DriverError on failure."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Owned(Closing):
    """Base of objects in a context: a handle, destroyed once.

    That happens by ``close()``, by ``with``, when the device closes, or by the garbage collector,
    whichever is first; the others then do nothing. Subclasses set ``kind`` and implement
    ``_destroy``.
    """

    kind: ClassVar[str]
    _handle: Any = None
    _holds: int = 0

    def __init__(self, device: OpenDevice, name: str, handle: Any) -> None:
        self.device = device
        self.name = name
        self._handle = handle
        device.context.adopt(self)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._handle is None

    @property
    def handle(self) -> Any:
        """The driver's handle; LifetimeError after close."""
        if self._handle is None:
            raise LifetimeError(f"{self.kind} {self.name!r} was used after it was closed")
        return self._handle

    def close(self) -> None:
        """Destroy it. Idempotent. Raises LifetimeError while another object needs it."""
        if self._handle is not None:
            self._check_unused()
            self.finish(quiet=False)

    def finish(self, quiet: bool) -> None:
        """Destroy it even if another object needs it: its device is closing, or it is
        unreachable."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            what = f"closing {self.kind} {self.name!r}"
            self.device.context.destroy(self._destroy, handle, what, quiet)

    def hold(self) -> None:
        """Mark it as needed by another object (a graph, an array of another library): `close` is
        refused."""
        _ = self.handle
        self._holds += 1

    def release(self) -> None:
        """Undo one `hold`."""
        if self._holds == 0:
            raise LifetimeError(f"{self.kind} {self.name!r} was released more often than held")
        self._holds -= 1

    def _check_unused(self) -> None:
        if self._holds:
            raise LifetimeError(
                f"{self.kind} {self.name!r} is held by {self._holds} recorded graph(s) or arrays "
                "of other libraries: close or delete them first"
            )

    def _destroy(self, handle: Any) -> Any:
        """The driver call that destroys it; returns that call's result tuple."""
        raise NotImplementedError

    def __del__(self) -> None:
        self.finish(quiet=True)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<{type(self).__name__} {self.name!r} on {self.device.name}, {state}>"
