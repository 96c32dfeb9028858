"""Devices: finding and opening a GPU or the emulator, ``Device.open("auto")``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from urdir.driver import bindings
from urdir.driver.apart import Compilers, most_compilers
from urdir.driver.cache import DEFAULT_LIMIT, CubinCache
from urdir.driver.compile import compile_ptx
from urdir.driver.context import Closing, Context
from urdir.driver.device_name import DeviceName
from urdir.driver.errors import (
    CudaError,
    DeviceNameError,
    DriverError,
    DriverTooOldError,
    NoDeviceError,
    NoDriverError,
    check,
)
from urdir.driver.kernel import Kernel
from urdir.driver.memory import Arena, Buffer
from urdir.driver.module import LoadedKernel, ModuleCache, Tell
from urdir.driver.pinned import PinnedBuffer
from urdir.driver.properties import driver_version, read_properties
from urdir.driver.ptx_files import PtxFiles
from urdir.driver.stream import Event, Stream
from urdir.ptxgen.ptx.architecture import OPENED, specific_target

#: Memory of the GPU that a process which compiles may take, and usually takes.
_COMPILER_NBYTES, _USUAL_NBYTES = 1 << 30, 1 << 29


@dataclass(frozen=True, slots=True)
class Probe:
    """The GPUs of this machine: ``status`` and a one-line description.

    ``status`` is "ok", "no driver", "driver too old", "no device" or "error"; ``version`` is the
    driver's CUDA version, ``devices`` the names of its GPUs, as far as known; ``error`` is the
    exception that opening a GPU would raise (None if ok).
    """

    status: str
    detail: str
    version: tuple[int, int] | None = None
    devices: tuple[str, ...] = ()
    error: DriverError | None = None

    @property
    def is_absent(self) -> bool:
        """Whether there is no usable GPU, as opposed to one that fails."""
        return self.status in ("no driver", "no device")


_STATUS: Mapping[type[DriverError], str] = {
    NoDriverError: "no driver",
    DriverTooOldError: "driver too old",
    NoDeviceError: "no device",
}


def probe(api: Any = None) -> Probe:
    """Look for GPUs without opening one; never raises a DriverError."""
    api = bindings.real() if api is None else api
    version = None
    try:
        version = driver_version(api)
        devices = _list_devices(api, version)
    except DriverError as exc:
        return Probe(_STATUS.get(type(exc), "error"), str(exc), version, (), exc)
    names = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(devices))
    detail = f"driver for CUDA {version[0]}.{version[1]}, {names}"
    return Probe("ok", detail, version, devices)


def _list_devices(api: Any, version: tuple[int, int]) -> tuple[str, ...]:
    absent = "the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    needed = (bindings.MINIMUM_VERSION // 1000, bindings.MINIMUM_VERSION % 1000 // 10)
    try:
        check(api, api.cuInit(0), "cuInit")
    except CudaError as exc:
        if exc.name == "CUDA_ERROR_NO_DEVICE":
            raise NoDeviceError(absent) from exc
        if version < needed:
            raise bindings.too_old(api) from exc
        raise
    count = int(check(api, api.cuDeviceGetCount(), "cuDeviceGetCount"))
    if count == 0:
        raise NoDeviceError(absent)
    if version < needed:
        raise bindings.too_old(api)
    handles = [check(api, api.cuDeviceGet(i), f"cuDeviceGet {i}") for i in range(count)]
    return tuple(
        bytes(check(api, api.cuDeviceGetName(256, h), "cuDeviceGetName")).split(b"\0")[0].decode()
        for h in handles
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Devices to open: their ``api`` and ``names``, and why ``auto`` chose the emulator ("" if it
    did not)."""

    api: Any
    names: tuple[DeviceName, ...]
    note: str = ""


def find_devices(name: str, ordinals: Sequence[int] | None, api: Any = None) -> Found:
    """The device of that name, or the devices ``ordinals`` of its kind; see `Device.open`."""
    wanted = DeviceName.parse(name)
    if ordinals is not None and wanted.index:
        raise DeviceNameError(f"device {name!r} is one GPU: use cuda for several")
    note = ""
    if wanted.kind != "emulator":
        api = bindings.real() if api is None else api
        found = probe(api)
        if wanted.kind == "auto" and found.is_absent:
            note = found.detail.split(";")[0]
            wanted, api = DeviceName("emulator"), None
        elif found.error is not None:
            raise found.error
        else:
            wanted = DeviceName("cuda", wanted.index)
            for index in ordinals or (wanted.index,):
                if index >= len(found.devices):
                    raise NoDeviceError(
                        f"no device cuda:{index}: this machine has "
                        f"{len(found.devices)} ({found.detail})"
                    )
    names = [replace(wanted, index=i) for i in ordinals or (wanted.index,)]
    if wanted.kind == "emulator":
        count = 1 + max(each.index for each in names)
        api = bindings.emulated(wanted.target, device_count=count) if api is None else api
        check(api, api.cuInit(0), "cuInit")
    return Found(api, tuple(names), note)


class Device(Closing):
    """An opened device: memory, streams and kernels are created from it and closed with it.

    ``name`` is the device string ("cuda:0", "emulator:sm_90"), ``target`` the target of portable
    kernels ("sm_90"), ``native_target`` the most specific one whose code runs here ("sm_90a" on an
    H200), ``note`` the reason why ``auto`` chose the emulator ("" if it did not). A context
    manager.
    """

    def __init__(
        self,
        api: Any,
        name: DeviceName,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        note: str = "",
        ptx_files: PtxFiles | None = None,
    ) -> None:
        self.api = api
        self.is_emulated = name.kind == "emulator"
        self.name = str(name)
        self.note = note
        self._ptx_files = ptx_files or PtxFiles()
        self._limit: int | None = None
        self._free_at_first = 0
        self._usable: int | None = None  # as it was, within `memory_as_it_is`
        self.context = Context(api, name.index, self.name)
        try:
            self.properties = read_properties(api, self.context.gpu)
            capability = self.properties.compute_capability
            self.target = target_for(capability, self.name)
            self.native_target = native_target(capability)
            if self.is_emulated and name.target != self.native_target:
                self.native_target = self.target  # it emulates a device without the extensions
            cache, of_caches = None, None if cache_folder is None else Path(cache_folder)
            if of_caches is not None:
                # a GPU cannot load an image of the emulator
                folder = of_caches / ("emulator" if self.is_emulated else "cuda")
                cache = CubinCache.open(folder, cache_limit or DEFAULT_LIMIT)
            self._modules = ModuleCache(
                self, cache, self._ptx_files, of_caches if cache is not None else None
            )
        except BaseException:
            self.context.close(quiet=True)
            raise

    @classmethod
    def open(
        cls,
        name: str = "auto",
        *,
        api: Any = None,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_limit: int | None = None,
        ptx_files: PtxFiles | None = None,
    ) -> Self:
        """Open ``auto``, ``cuda[:i]`` or ``emulator[:sm_NN]``.

        ``auto`` takes the first GPU; without a driver or device it takes the emulator and gives the
        reason in ``note``; a GPU that fails is an error. ``api`` replaces the bindings (an emulator
        with injected faults). ``cache_folder`` holds compiled kernels, at most ``cache_limit``
        bytes (1 GB); None disables the cache, and so does, with a warning, a folder that cannot be
        used. ``ptx_files`` are folders of edited PTX to use and of PTX to write. Raises
        DeviceNameError, NoDriverError, DriverTooOldError, NoDeviceError, CudaError.
        """
        found = find_devices(name, None, api)
        return cls(found.api, found.names[0], cache_folder, cache_limit, found.note, ptx_files)

    def memory_info(self) -> tuple[int, int]:
        """Current (free, total) bytes of device memory."""
        self.context.make_current()
        free, total = check(self.api, self.api.cuMemGetInfo(), "cuMemGetInfo")
        return int(free), int(total)

    def limit_memory(self, nbytes: int | None) -> None:
        """From now on `usable_memory` counts up to ``nbytes`` bytes in all (None: no limit)."""
        self._limit = nbytes
        self._free_at_first = self.memory_info()[0]
        if nbytes is not None and self._usable is not None:
            self._usable = min(self._usable, nbytes)

    def usable_memory(self) -> int:
        """Bytes that are free, and below the limit."""
        if self._usable is not None:
            return self._usable
        free, _ = self.memory_info()
        if self._limit is None:
            return free
        used = max(0, self._free_at_first - free)  # less if another process has freed some since
        return max(0, min(free, self._limit - used))

    @contextmanager
    def memory_as_it_is(self) -> Iterator[None]:
        """Within, `usable_memory` is what it was at first, whatever other processes take: contexts
        of compilers, which have memory that nothing here is given."""
        self._usable = self.usable_memory()
        try:
            yield
        finally:
            self._usable = None

    def allocate(self, nbytes: int, name: str) -> Buffer:
        """Allocate ``nbytes`` bytes, contents undefined; ``name`` is for messages. Raises
        OutOfMemoryError, TransferError for no bytes."""
        return Buffer(self, nbytes, name)

    def arena(self, sizes: Mapping[str, int], name: str) -> Arena:
        """Allocate one buffer with an aligned slice of the given bytes for every name. Raises as
        `allocate`."""
        return Arena(self, sizes, name)

    def pinned(self, nbytes: int, name: str) -> PinnedBuffer:
        """Allocate ``nbytes`` bytes of page-locked host memory. Raises CudaError, OutOfMemoryError,
        TransferError for no bytes."""
        return PinnedBuffer(self, nbytes, name)

    def create_stream(self, name: str = "stream") -> Stream:
        """Create a stream; ``name`` is for messages. Raises CudaError."""
        return Stream(self, name)

    def create_event(self, name: str = "event") -> Event:
        """Create an event; `Stream.record` creates its own by default. Raises CudaError."""
        return Event(self, name)

    def load(self, kernel: Kernel) -> LoadedKernel:
        """Compile and load a kernel; returns the same object for an equal spec key.

        Raises LaunchError if its launch shape exceeds the device, PtxLoadError if its PTX does not
        compile or differs from its declared parameters.
        """
        return self._modules.load([kernel], self)[0]

    def is_loaded(self, kernel: Kernel) -> bool:
        """Whether a kernel is loaded already."""
        return self._modules.has(kernel, self)

    @property
    def kernel_nbytes(self) -> int:
        """Approximate device memory of loaded kernels, which stay loaded."""
        return self._modules.nbytes

    def load_all(self, kernels: Sequence[Kernel], tell: Tell | None = None) -> list[LoadedKernel]:
        """Load several kernels, compiling in threads; ``tell`` receives the numbers done and in
        all. Raises as `load` does."""
        return self._modules.load(kernels, self, tell)

    def compile_beside(self, kernels: Sequence[Kernel]) -> None:
        """Have other processes compile, and wait for them, what would hold up launches of this one
        when it is loaded; after `begin_compilers` all that is new. What fails there is compiled
        when it is loaded."""
        self._modules.compile_beside(kernels, self)

    def store(self, kernel: Kernel) -> None:
        """Compile a kernel into the caches on disk, for another process that will load it. Raises
        as `load` does, except what only a loaded kernel tells."""
        self._modules.store(kernel, self)

    def begin_compilers(self, spare: int | None = None, begun: Compilers | None = None) -> None:
        """From now on other processes compile for `compile_beside`, as many as pay and as the
        GPU has memory for.

        With ``spare`` bytes, which the caller leaves to them, that is so where no kernel was ever
        compiled; then as many as these are enough for start at once. They are those that have
        ``begun`` (`compilers_for`), if there are any, which are closed where they are of no use.
        """
        free, _ = self.memory_info()
        most, modules = min(most_compilers(), free // _COMPILER_NBYTES), self._modules
        if spare is not None:
            most = min(most, spare // _USUAL_NBYTES) if modules.knows_none else 0
        if modules.compilers is None and most:
            modules.compilers = begun or modules.compilers_of(self, most)
            if spare is not None:
                modules.compilers.fork(most)
        elif begun is not None:
            begun.close()

    @property
    def has_compilers(self) -> bool:
        """Whether other processes compile all that `compile_beside` gets."""
        return self._modules.compilers is not None

    @property
    def wants_kernels(self) -> bool:
        """Whether these have begun and may soon have nothing to do."""
        compilers = self._modules.compilers
        return compilers is not None and compilers.is_short

    def end_compilers(self) -> None:
        """End these processes. Idempotent."""
        if (compilers := self._modules.compilers) is not None:
            self._modules.compilers = None
            compilers.close()

    def compile(self, ptx: str, name: str) -> bytes:
        """Compile a PTX text to machine code (a cubin) for this device.

        ``name`` is used in messages. Raises PtxLoadError if the text does not compile.
        """
        self.context.make_current()
        return compile_ptx(self.api, ptx, name)

    def synchronize(self) -> None:
        """Wait for all work of the device. Raises CudaError if a kernel faulted."""
        self.context.make_current()
        check(self.api, self.api.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Close everything created on the device, and release it. Idempotent."""
        self.end_compilers()
        if self.context.alive:
            self._ptx_files.device_closed()
        self.context.close()

    def __del__(self) -> None:
        if hasattr(self, "context"):
            self.context.close(quiet=True)

    def __repr__(self) -> str:
        return f"<Device {self.name}, {self.properties.name}>"


def target_for(capability: tuple[int, int], name: str) -> str:
    """The newest known architecture of the same major family that runs on ``capability``.

    Raises DriverError if there is none.
    """
    known = [divmod(number, 10) for number in OPENED]
    usable = [a for a in known if a[0] == capability[0] and a <= capability]
    if not usable:
        supported = ", ".join(f"{major}.{minor}" for major, minor in known)
        raise DriverError(
            f"device {name} has compute capability {capability[0]}.{capability[1]}, which is not "
            f"supported (supported: {supported} and newer ones of the same major version)"
        )
    major, minor = usable[-1]
    return f"sm_{major}{minor}"


def native_target(capability: tuple[int, int]) -> str:
    """The architecture-specific target of ``capability`` ("sm_90a") if it exists, else that of
    `target_for`."""
    major, minor = capability
    return specific_target(10 * major + minor) or target_for(capability, "")
