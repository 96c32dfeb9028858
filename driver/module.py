"""Loaded kernels: from a spec (or the disk cache) to a function checked against the spec."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from urdir.driver.apart import Compilers
from urdir.driver.cache import CubinCache
from urdir.driver.compile import compile_ptx, image_of, is_whole
from urdir.driver.context import OpenDevice, Owned
from urdir.driver.cubin import CubinKernel
from urdir.driver.errors import (
    CudaError,
    LaunchError,
    OutOfMemoryError,
    PtxLoadError,
    check,
    error_of,
)
from urdir.driver.kernel import Kernel, signature
from urdir.driver.limits import check_limits
from urdir.driver.parallel import in_threads
from urdir.driver.ptx_files import PtxFiles
from urdir.ptxgen.ptx.origin import digest, origins, remember

#: Kernels that threads of this process compile beside launches: the next steps of an answer alone
#: need them sooner than another process starts. More are of a new shape of a service, whose steps
#: would wait for the interpreter meanwhile.
_FEW = 8
#: Processes that compile these.
_ONCE = 2
#: Device memory of a loaded kernel, about: 321 of an 8B model took 6.3 MB of an H200 (CUDA 13.0,
#: 2026-11-29). They stay loaded, since a graph takes 0.7 MB, and unloading one waits for all work
#: that is queued.
KERNEL_NBYTES = 20 << 10
#: Keys that are kept.
_MOST_KEYS = 4096
#: Receives the numbers done and in all.
Tell = Callable[[int, int], None]

# Field of Resources -> name of its CUfunction_attribute.
_RESOURCES: Mapping[str, str] = {
    "registers": "NUM_REGS",
    "local_bytes": "LOCAL_SIZE_BYTES",
    "shared_bytes": "SHARED_SIZE_BYTES",
    "max_threads": "MAX_THREADS_PER_BLOCK",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource use of a loaded kernel: registers and local bytes per thread, static shared bytes.

    ``max_threads`` is the largest CTA that its registers and its ``.maxntid`` allow.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    max_threads: int


class LoadedKernel(Owned):
    """A kernel ready to launch: ``function`` for the driver, ``kernel`` (its spec), ``resources``.

    Its handle is the module, unloaded when it closes.
    """

    kind = "kernel"

    def __init__(self, device: OpenDevice, kernel: Kernel, module: Any) -> None:
        super().__init__(device, kernel.name, module)
        self.kernel = kernel
        try:
            self.function = _find_entry(device.api, module, kernel)
            _check_params(device.api, self.function, kernel)
            self.resources = _read_resources(device.api, self.function, kernel)
            _prepare(device, self.function, kernel, self.resources)
        except BaseException:
            self.finish(quiet=True)
            raise

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuModuleUnload(handle)


@dataclass(frozen=True, slots=True)
class _Text:
    """A kernel with its PTX, which is edited or generated."""

    kernel: Kernel
    key: str
    ptx: str
    is_edited: bool


class ModuleCache:
    """The loaded kernels of one device by spec key. Thread-safe.

    ``disk`` stores their cubins (None: not stored); ``folder`` is the one that it was opened for.
    ``files`` may replace generated PTX, and receives what is loaded.
    """

    def __init__(
        self, device: OpenDevice, disk: CubinCache | None, files: PtxFiles, folder: Path | None
    ) -> None:
        self._identity = _driver_identity(device)
        self._disk = disk
        self._folder = folder
        #: Processes for `compile_beside`.
        self.compilers: Compilers | None = None
        self._files = files
        self._loaded: dict[str, LoadedKernel] = {}
        #: By the identity of kernels, which live as long as their entry: a key takes 0.1 ms.
        self._keys: dict[int, tuple[Kernel, str]] = {}
        self._lock = threading.Lock()

    def load(
        self, kernels: Sequence[Kernel], device: OpenDevice, tell: Tell | None = None
    ) -> list[LoadedKernel]:
        """Load kernels; see `Device.load_all`."""
        keyed = [(self._key(kernel, device), kernel) for kernel in kernels]
        if not any(self._is_new(key) for key, _ in keyed):  # do not wait for other compilations
            return [self._loaded[key] for key, _ in keyed]
        with self._lock:
            device.context.make_current()
            new: dict[str, Kernel] = {}
            for key, kernel in keyed:
                if self._is_new(key) and key not in new:
                    check_limits(kernel, device.properties)
                    new[key] = kernel
            for key, kernel in new.items():
                if isinstance(kernel, CubinKernel):
                    image = _load_image(device.api, kernel.cubin, kernel)
                    self._loaded[key] = LoadedKernel(device, kernel, image)
                elif found := self._from_disk(kernel, key, device):
                    self._loaded[key] = found
            unknown = [(kernel, key) for key, kernel in new.items() if self._is_new(key)]
            made = itertools.count(1)

            def make(text: _Text) -> None:
                self._make(text, device)
                if tell is not None:
                    tell(next(made), len(unknown))

            # PTX is rendered in this thread alone: rendering holds the interpreter, compiling does
            # not, and threads that wait for the interpreter delay those of a service.
            in_threads(make, (self._text(each, device) for each in unknown), len(unknown))
            return [self._loaded[key] for key, _ in keyed]

    def compile_beside(self, kernels: Sequence[Kernel], device: OpenDevice) -> None:
        """Have other processes compile kernels; see `Device.compile_beside`."""
        target, compilers = device.native_target, self.compilers
        texts = (kernel for kernel in kernels if not isinstance(kernel, CubinKernel))
        keyed = {self._key(kernel, device): kernel for kernel in texts}
        unknown = {key: kernel for key, kernel in keyed.items() if self._is_unknown(key)}
        is_few = compilers is None and len(unknown) <= _FEW
        if is_few or self._disk is None:  # only what would hold up launches
            if device.is_emulated:
                return
            unknown = {key: each for key, each in unknown.items() if is_whole(each.ptx(target))}
        if compilers is not None:
            compilers.compile(unknown)
        elif unknown and not device.is_emulated and hasattr(os, "fork"):
            with self.compilers_of(device, 1 if is_few else _ONCE) as once:
                once.compile(unknown)

    def store(self, kernel: Kernel, device: OpenDevice) -> None:
        """Compile a kernel into the caches on disk; see `Device.store`."""
        key = self._key(kernel, device)
        text = self._text((kernel, key), device)
        if self._disk is None or text.is_edited or is_whole(text.ptx):
            self._make(text, device)  # the driver compiles what is loaded
            self._loaded.pop(key).close()
            return
        ptx_hash = digest(text.ptx)
        cubin_key = self._cubin_key(ptx_hash)
        if self._disk.get(cubin_key) is None:
            device.context.make_current()
            self._disk.put(cubin_key, compile_ptx(device.api, text.ptx, kernel.name))
        self._disk.remember(key, ptx_hash)

    @property
    def knows_none(self) -> bool:
        """Whether all kernels will have to be compiled, into a cache on disk."""
        return self._disk is not None and self._disk.is_empty

    def compilers_of(self, device: OpenDevice, most: int) -> Compilers:
        """Processes that compile for this cache; see `Compilers`."""
        limit = None if self._disk is None else self._disk.limit
        return Compilers(device.name, self._folder, limit, most)

    def _is_unknown(self, key: str) -> bool:
        """Whether a kernel has to be compiled from what its spec renders, or other processes were
        asked to."""
        if (compilers := self.compilers) is not None and compilers.knows(key):
            return True  # without a look at the disk
        if not self._is_new(key) or self._files.overriding(key) is not None:
            return False
        return self._disk is None or self._disk.ptx_hash(key) is None

    @property
    def nbytes(self) -> int:
        """Approximate device memory of the kernels in bytes."""
        return KERNEL_NBYTES * len(self._loaded)

    def has(self, kernel: Kernel, device: OpenDevice) -> bool:
        """Whether a kernel is loaded."""
        return not self._is_new(self._key(kernel, device))

    def _key(self, kernel: Kernel, device: OpenDevice) -> str:
        known = self._keys.get(id(kernel))
        if known is None:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            known = self._keys[id(kernel)] = kernel, kernel.key(device.native_target)
        return known[1]

    def _is_new(self, key: str) -> bool:
        found = self._loaded.get(key)
        return found is None or found.closed

    def _text(self, unknown: tuple[Kernel, str], device: OpenDevice) -> _Text:
        """A kernel with its PTX, edited or generated."""
        kernel, key = unknown
        override = self._files.overriding(key)
        if override is not None:
            return _Text(kernel, key, override, is_edited=True)
        return _Text(kernel, key, kernel.ptx(device.native_target), is_edited=False)

    def _make(self, text: _Text, device: OpenDevice) -> None:
        """Load a kernel from its PTX, in any thread."""
        device.context.make_current()
        self._loaded[text.key] = self._build(text.kernel, text.key, text.ptx, device)
        if self._disk is not None and not text.is_edited:
            self._disk.remember(text.key, digest(text.ptx))

    def _from_disk(self, kernel: Kernel, key: str, device: OpenDevice) -> LoadedKernel | None:
        """Load a kernel from its cached cubin, without rendering its PTX.

        None if no entry loads, if its PTX was edited, or if it is to be dumped.
        """
        if self._files.dump is not None or self._files.overriding(key) is not None:
            return None
        if self._disk is None or (ptx_hash := self._disk.ptx_hash(key)) is None:
            return None
        cubin_key = self._cubin_key(ptx_hash)
        target = device.native_target
        remember(ptx_hash, lambda _: origins(kernel.ptx(target)))
        return self._load_cached(kernel, cubin_key, self._disk.get(cubin_key), device)

    def _load_cached(
        self, kernel: Kernel, cubin_key: str, cubin: bytes | None, device: OpenDevice
    ) -> LoadedKernel | None:
        if self._disk is None or cubin is None:
            return None
        try:
            return LoadedKernel(device, kernel, _load_image(device.api, cubin, kernel))
        except (CudaError, PtxLoadError) as exc:
            if isinstance(exc, OutOfMemoryError) or (isinstance(exc, CudaError) and exc.sticky):
                raise  # not the entry's fault
            self._disk.discard(cubin_key, f"it does not load ({exc})")
            return None

    def _build(self, kernel: Kernel, key: str, ptx: str, device: OpenDevice) -> LoadedKernel:
        """Load a kernel from its PTX; its cubin may be on disk."""
        cubin_key = self._cubin_key(digest(ptx))
        cubin = self._disk.get(cubin_key) if self._disk is not None else None
        found = self._load_cached(kernel, cubin_key, cubin, device)
        if found is None or cubin is None:
            cubin = image_of(device.api, ptx, kernel.name)
            try:
                found = LoadedKernel(device, kernel, _load_image(device.api, cubin, kernel))
            except CudaError:
                compile_ptx(device.api, ptx, kernel.name)  # says in which line an error is
                raise
            if self._disk is not None:
                self._disk.put(cubin_key, cubin)
        self._files.write(key, ptx, None if device.is_emulated or is_whole(ptx) else cubin)
        return found

    def _cubin_key(self, ptx_hash: str) -> str:
        return hashlib.sha256(f"{ptx_hash}\n{self._identity}".encode()).hexdigest()


def _load_image(api: Any, cubin: bytes, kernel: Kernel) -> Any:
    return check(api, api.cuModuleLoadData(cubin), f"cuModuleLoadData of kernel {kernel.name}")


def _find_entry(api: Any, module: Any, kernel: Kernel) -> Any:
    status, function = api.cuModuleGetFunction(module, kernel.name.encode())
    if int(status):
        error = error_of(api, status, f"cuModuleGetFunction {kernel.name}")
        if error.name == "CUDA_ERROR_NOT_FOUND":
            raise PtxLoadError(f"the PTX of kernel {kernel.name} has no entry of that name")
        raise error
    return function


def _check_params(api: Any, function: Any, kernel: Kernel) -> None:
    """Compare the entry's parameter block with the spec's; they must agree exactly."""
    declared = signature(kernel).layout
    compiled: list[tuple[int, int]] = []
    while True:
        status, offset, size = api.cuFuncGetParamInfo(function, len(compiled))
        if int(status):
            error = error_of(api, status, f"cuFuncGetParamInfo {len(compiled)} of {kernel.name}")
            if error.name != "CUDA_ERROR_INVALID_VALUE":  # i.e. no such parameter
                raise error
            break
        compiled.append((int(offset), int(size)))
    if tuple(compiled) != declared:
        names = ", ".join(param.name for param in kernel.params)
        raise PtxLoadError(
            f"kernel {kernel.name}: the PTX and the spec disagree about the parameters ({names}): "
            f"(offset, size) {compiled} in the PTX, {list(declared)} in the spec"
        )


def _read_resources(api: Any, function: Any, kernel: Kernel) -> Resources:
    values = {}
    for field, name in _RESOURCES.items():
        key = getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        what = f"cuFuncGetAttribute {name} of kernel {kernel.name}"
        values[field] = int(check(api, api.cuFuncGetAttribute(key, function), what))
    return Resources(**values)


def _prepare(device: OpenDevice, function: Any, kernel: Kernel, resources: Resources) -> None:
    """Refuse launches that are legal but cannot run; allow large dynamic shared memory."""
    api, properties, shape = device.api, device.properties, kernel.launch_shape
    threads = shape.block[0] * shape.block[1] * shape.block[2]
    where = f"kernel {kernel.name} cannot be launched on {properties.name}"
    if threads > resources.max_threads:
        raise LaunchError(
            f"{where}: threads of a block are {threads}, the limit is {resources.max_threads} "
            f"for its {resources.registers} registers a thread"
        )
    shared = resources.shared_bytes + shape.shared_bytes
    if shared > properties.shared_per_block_optin:
        raise LaunchError(
            f"{where}: shared memory of a block is {shared:,} bytes ({resources.shared_bytes:,} "
            f"static), the limit is {properties.shared_per_block_optin:,}"
        )
    if shared > properties.shared_per_block:
        key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        what = f"cuFuncSetAttribute MAX_DYNAMIC_SHARED_SIZE_BYTES of kernel {kernel.name}"
        check(api, api.cuFuncSetAttribute(function, key, shape.shared_bytes), what)
    if shape.prefers_shared:
        key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        what = f"cuFuncSetAttribute PREFERRED_SHARED_MEMORY_CARVEOUT of kernel {kernel.name}"
        check(api, api.cuFuncSetAttribute(function, key, 100), what)
    if shape.cooperative:
        what = f"cuOccupancyMaxActiveBlocksPerMultiprocessor of kernel {kernel.name}"
        result = api.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, threads, shape.shared_bytes
        )
        resident = int(check(api, result, what)) * properties.sm_count
        ctas = shape.grid[0] * shape.grid[1] * shape.grid[2]
        if ctas > resident:
            raise LaunchError(
                f"{where}: a cooperative grid of {ctas} CTAs, {resident} fit on the device at once"
            )


def _driver_identity(device: OpenDevice) -> str:
    """Everything but the PTX that determines the cubin: GPU architecture, driver, options."""
    properties = device.properties
    parts = [
        device.native_target,
        *(str(v) for v in (*properties.compute_capability, *properties.driver_version)),
        "emulated" if device.is_emulated else "",
    ]
    release = Path("/proc/driver/nvidia/version")
    if not device.is_emulated and release.exists():
        parts.append(release.read_text().split("\n")[0])
    return "\n".join(parts)
