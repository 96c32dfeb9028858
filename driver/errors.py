"""Typed errors of the driver, and ``check()``, the single path of all driver results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DriverError(Exception):
    """Base of everything ``urdir.driver`` raises."""


class NoDriverError(DriverError):
    """This machine has no NVIDIA driver (libcuda cannot be found)."""


class DriverTooOldError(DriverError):
    """The installed driver lacks what urdir needs."""


class NoDeviceError(DriverError):
    """No usable GPU, or not the requested one."""


class DeviceNameError(DriverError):
    """A device string is not one of ``auto``, ``cuda[:i]``, ``emulator[:sm_NN]``."""


class LifetimeError(DriverError):
    """An object was used after close, freed while in use, or used across a fork."""


class GroupError(DriverError):
    """A device of a group has failed, which makes all of them unusable."""


class HostWorkError(DriverError):
    """The host could not do its part of a plan, of which what was queued before runs: memory of the
    device may not have what later plans rely on."""


class TransferError(DriverError):
    """A copy does not fit: outside its buffer, wrong type, wrong shape, or not contiguous."""


class LaunchError(DriverError):
    """A launch was refused before the driver call: wrong arguments or extent."""


class MismatchError(DriverError):
    """A kernel's output is wrong, or an array is not what its parameter needs: says which."""


class PtxLoadError(DriverError):
    """PTX could not be compiled, or differs from its kernel's declaration.

    ``log`` is the compiler's, ``dump`` the file the PTX was written to (None if it was not).
    """

    def __init__(self, message: str, log: str = "", dump: str | None = None) -> None:
        super().__init__(message)
        self.log = log
        self.dump = dump


# Meaning of a status and what to do about it, if the name is not enough.
MEANINGS: Mapping[str, str] = {
    "CUDA_ERROR_INVALID_VALUE": "an argument is outside its allowed range",
    "CUDA_ERROR_OUT_OF_MEMORY": "the device has not enough free memory; use a smaller model or "
    "context, or end other processes on this GPU",
    "CUDA_ERROR_NOT_INITIALIZED": "cuInit has not succeeded in this process (or the process was "
    "forked after it)",
    "CUDA_ERROR_DEINITIALIZED": "the driver is shutting down with this process",
    "CUDA_ERROR_STUB_LIBRARY": "the stub libcuda of a toolkit was loaded instead of the driver's; "
    "take the stubs folder off the library path",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "the GPU is busy or in exclusive mode; see nvidia-smi",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no GPU with this index",
    "CUDA_ERROR_INVALID_IMAGE": "the cubin or PTX is damaged",
    "CUDA_ERROR_INVALID_CONTEXT": "no context is current, or it has been destroyed",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin was made for another GPU generation",
    "CUDA_ERROR_INVALID_PTX": "the PTX does not compile; see the log",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the PTX is newer than the driver; update the driver",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": "the driver's libnvidia-ptxjitcompiler is missing; "
    "install the complete driver",
    "CUDA_ERROR_INVALID_HANDLE": "a handle is not valid (any more) in this context",
    "CUDA_ERROR_NOT_FOUND": "the module has no such entry",
    "CUDA_ERROR_NOT_READY": "the work asked about has not finished",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote outside every allocation",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many threads, registers or shared memory for a CTA",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran too long and was stopped",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel's call stack was corrupted or overflowed",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel met an instruction that the GPU does not know",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel's load or store was not aligned to its size",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "an instruction was given an address of another space",
    "CUDA_ERROR_INVALID_PC": "a kernel jumped outside its code",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel faulted (a bad address in shared or local memory, or "
    "a trap)",
    "CUDA_ERROR_ASSERT": "a device-side assertion failed",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "the grid of a cooperative launch does not fit on "
    "the GPU at once",
    "CUDA_ERROR_NOT_PERMITTED": "the operation is not allowed here",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver cannot do it",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver's services are not up (NVSwitch: fabric manager)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel module differ in version; reload "
    "the module or reboot",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the forward-compatibility libcuda does not "
    "support this GPU",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory failed; see nvidia-smi -q -d ECC",
    "CUDA_ERROR_UNKNOWN": "an internal driver failure; see the kernel log (dmesg, NVRM)",
}

#: Errors after which a context is unusable: every later call returns them.
STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "LAUNCH_FAILED",
        "MISALIGNED_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "HARDWARE_STACK_ERROR",
        "ASSERT",
        "ECC_UNCORRECTABLE",
        "CONTAINED",
        "TENSOR_MEMORY_LEAK",
    )
)


class CudaError(DriverError):
    """A driver call returned an error.

    ``name`` is the symbolic status ("CUDA_ERROR_ILLEGAL_ADDRESS"), ``code`` its number, ``call``
    describes the call, ``meaning`` is a short explanation ("" for a rare status, and where
    ``fault`` knows better), ``sticky`` whether the context is lost, ``fault`` what the emulator
    found: kernel, line, thread and hint ("" on a GPU).
    """

    def __init__(
        self, name: str, code: int, call: str, detail: str = "", *, fault: str = ""
    ) -> None:
        self.name = name
        self.code = code
        self.call = call
        self.fault = fault
        self.meaning = "" if fault else MEANINGS.get(name, "")
        self.sticky = name in STICKY
        message = f"{call}: {name} ({code})"
        if self.meaning:
            message += f": {self.meaning}"
        super().__init__(message + detail)


def loses_device(error: BaseException) -> bool:
    """Whether ``error`` makes its device or group, or what is in its memory, unusable."""
    if isinstance(error, CudaError):
        return error.sticky
    return isinstance(error, GroupError | HostWorkError)


class OutOfMemoryError(CudaError):
    """Out of memory; for a refused buffer with ``needed``, ``free`` and ``total`` bytes.

    They are 0 if the allocation was not a buffer: a module, a graph.
    """

    def __init__(
        self,
        name: str,
        code: int,
        call: str,
        detail: str = "",
        *,
        needed: int = 0,
        free: int = 0,
        total: int = 0,
    ) -> None:
        super().__init__(name, code, call, detail)
        self.needed = needed
        self.free = free
        self.total = total


def check(api: Any, result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call (a tuple for several values), or its error raised.

    ``result`` is the return value of a function of ``api``, ``what`` describes the call and its
    object: ``check(api, api.cuMemAlloc(n), "cuMemAlloc 4096 bytes for 'x'")``. Raises CudaError.
    The first sticky error is stored as ``api.poisoned_by``; later errors mention it.
    """
    status = result[0]
    if int(status) == 0:
        return result[1] if len(result) == 2 else result[1:] or None
    raise error_of(api, status, what)


def error_of(api: Any, status: Any, what: str) -> CudaError:
    """The CudaError for a failure status; see `check`."""
    code = int(status)
    try:
        name = str(api.CUresult(code).name)
    except ValueError:
        name = f"CUresult {code}"
    earlier: CudaError | None = getattr(api, "poisoned_by", None)
    detail = ""
    if name in STICKY:
        detail = (
            "; the context is poisoned: every later call on this device fails, end the process "
            "or close the device"
        )
        if earlier is not None:
            detail += f" (first reported by {earlier.call})"
    fault = getattr(api, "last_fault", "") if name in STICKY else ""
    if fault:
        detail += f"\n{fault}"
    if name in STICKY and earlier is None and (explain := getattr(api, "explain_fault", None)):
        detail += explain()
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return OutOfMemoryError(name, code, what, detail)
    error = CudaError(name, code, what, detail, fault=fault)
    if error.sticky and earlier is None:
        api.poisoned_by = error
    return error
