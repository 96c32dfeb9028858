"""The primary context of one GPU, and the lifetime rules of everything that lives in it."""

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

    ``ordinal`` is the driver's index of the GPU. Raises CudaError when it cannot be had.
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
        """Reach the memory of ``peers`` from now on, by kernels and copies of this context. A fault
        of any of them ends this one's use, too: they share one ``api``.

        Raises DriverError where the devices cannot reach each other, CudaError.
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
            check(self.api, self.api.cuCtxEnablePeerAccess(peer.handle, 0), what)
            self._peers.add(peer)
        self._in_group = True

    def reaches(self, other: Context) -> bool:
        """Whether kernels of this context may be given memory of another."""
        return other is self or other in self._peers

    @property
    def alive(self) -> bool:
        """False after close, in a forked child and at interpreter exit: nothing may be called."""
        return not self._closed and os.getpid() == self._pid and not sys.is_finalizing()

    def make_current(self) -> None:
        """Make this the calling thread's context.

        Always set, never cached: another library (or another device) of this process may have
        changed it, and setting costs no more than asking. Raises LifetimeError when the context is
        closed or belongs to the parent of a forked process, GroupError when a device of its group
        has failed.
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
        """Remember something that must end before this context does."""
        self._owned[next(self._numbers)] = owned  # threads may be loading kernels

    def destroy(self, call: Callable[[Any], Any], handle: Any, what: str, quiet: bool) -> None:
        """Run a destroying driver call with this context current, then restore the former one.

        (A finaliser may run between any two calls, of any thread.) Nothing happens where nothing
        is left to destroy; a poisoned context has lost its objects already. Raises CudaError for
        other failures unless ``quiet``; where this context cannot be made current, nothing is
        destroyed.
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
                self.api.cuCtxSetCurrent(former[1])  # fails where its owner has ended it
        self._report(status, what, quiet)

    def _report(self, status: Any, what: str, quiet: bool) -> None:
        if int(status):
            error = error_of(self.api, status, what)
            if not quiet and not error.sticky:
                raise error

    def close(self, quiet: bool = False) -> None:
        """End everything that still lives here, newest first, and release the context."""
        if self.alive:
            for owned in [*self._owned.values()][::-1]:
                owned.finish(quiet=True)
            self._owned.clear()
            self._closed = True
            status = self.api.cuDevicePrimaryCtxRelease(self._gpu)[0]
            self._report(status, f"cuDevicePrimaryCtxRelease on {self.name}", quiet)
        self._closed = True


class OpenDevice(Protocol):
    """What the things that live on a device ask of it; `urdir.driver.device.Device` makes them."""

    @property
    def api(self) -> Any:
        """The driver's functions, real or emulated (`urdir.driver.bindings`)."""

    @property
    def name(self) -> str:
        """The device string: "cuda:0", "emulator:sm_90"."""

    @property
    def target(self) -> str:
        """What portable kernels are made for: "sm_90"."""

    @property
    def native_target(self) -> str:
        """The most special target whose code runs here: "sm_90a" on an H200."""

    @property
    def is_emulated(self) -> bool:
        """True for the emulator."""

    @property
    def context(self) -> Context:
        """The context that everything on the device lives in."""

    @property
    def properties(self) -> DeviceProperties:
        """What the device is and what it can do."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of device memory now."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""


class Closeable(Protocol):
    """What `close_all` closes."""

    def close(self) -> None:
        """End it; DriverError where that fails."""


def close_all(items: Iterable[Closeable]) -> None:
    """Close all of them, whatever happens; raise the first failure."""
    first: DriverError | None = None
    for item in items:
        try:
            item.close()
        except DriverError as error:
            first = first or error
    if first is not None:
        raise first


class Owned:
    """Base of what lives in a context: a handle, ended once.

    By ``close()``, by ``with``, when its device closes, or by the collector, whichever is first;
    all of them may come again. Subclasses name their ``kind`` and implement ``_destroy``.
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
        """True once it has ended."""
        return self._handle is None

    @property
    def handle(self) -> Any:
        """The driver's handle; raises LifetimeError after the end."""
        if self._handle is None:
            raise LifetimeError(f"{self.kind} {self.name!r} was used after it was closed")
        return self._handle

    def close(self) -> None:
        """End it now; again is harmless. Raises LifetimeError while something else needs it."""
        if self._handle is not None:
            self._check_unused()
            self.finish(quiet=False)

    def finish(self, quiet: bool) -> None:
        """End it even if something needs it: its device is closing, or it is unreachable."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            what = f"closing {self.kind} {self.name!r}"
            self.device.context.destroy(self._destroy, handle, what, quiet)

    def hold(self) -> None:
        """Say that something with a life of its own (a graph) needs this: `close` is refused."""
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
                f"{self.kind} {self.name!r} is held by {self._holds} recorded graph(s): "
                "close them first"
            )

    def _destroy(self, handle: Any) -> Any:
        """The driver call that ends it; returns that call's result tuple."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.finish(quiet=True)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<{type(self).__name__} {self.name!r} on {self.device.name}, {state}>"
