"""Initialisation, devices, primary contexts, current contexts of threads."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

import ctypes
import functools
import os
import uuid
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Needs, Refused, driver_call, expect_enum, handle, uint
from urdir.driver.emulator.properties import MIB, DeviceProperties
from urdir.driver.emulator.state import Driver

# Results of cuGetErrorString; other errors are described by their names.
_MEANINGS = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_OUT_OF_MEMORY": "out of memory",
    "CUDA_ERROR_NOT_INITIALIZED": "initialization error",
    "CUDA_ERROR_NO_DEVICE": "no CUDA-capable device is detected",
    "CUDA_ERROR_INVALID_DEVICE": "invalid device ordinal",
    "CUDA_ERROR_INVALID_IMAGE": "device kernel image is invalid",
    "CUDA_ERROR_INVALID_CONTEXT": "invalid device context",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "CUDA_ERROR_INVALID_PTX": "a PTX JIT compilation failed",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the provided PTX was compiled with an unsupported "
    "toolchain.",
    "CUDA_ERROR_INVALID_HANDLE": "invalid resource handle",
    "CUDA_ERROR_NOT_FOUND": "named symbol not found",
    "CUDA_ERROR_NOT_READY": "device not ready",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context is destroyed",
    "CUDA_ERROR_ASSERT": "device-side assert triggered",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
    "CUDA_ERROR_NOT_SUPPORTED": "operation not supported",
}

# Readable function limits (CUlimit): their initial values.
_LIMITS = {
    "CU_LIMIT_STACK_SIZE": 1024,
    "CU_LIMIT_PRINTF_FIFO_SIZE": 7 * MIB,
    "CU_LIMIT_MALLOC_HEAP_SIZE": 8 * MIB,
}


@driver_call(needs=Needs.NOTHING)
def cuInit(driver: Driver, Flags: Any) -> None:
    """Initialise the driver in this process."""
    if uint(Flags):
        raise Refused("CUDA_ERROR_INVALID_VALUE", "cuInit takes no flags")
    if code := driver.injections.strike("init"):
        raise Refused(code, "injected fault")
    driver.initialised_in = os.getpid()


@driver_call(results=1, needs=Needs.NOTHING)
def cuDriverGetVersion(driver: Driver) -> int:
    """13000 for CUDA 13.0."""
    return driver.driver_version


@driver_call(results=1, needs=Needs.NOTHING)
def cuGetErrorName(driver: Driver, error: Any) -> bytes:
    """The enum name of an error."""
    return str(expect_enum("error", error, cuda.CUresult).name).encode()


@driver_call(results=1, needs=Needs.NOTHING)
def cuGetErrorString(driver: Driver, error: Any) -> bytes:
    """A description of an error."""
    name = str(expect_enum("error", error, cuda.CUresult).name)
    return _MEANINGS.get(name, name).encode()


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGetCount(driver: Driver) -> int:
    """Number of devices."""
    return driver.device_count


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGet(driver: Driver, ordinal: Any) -> Any:
    """The handle of a device."""
    return cuda.CUdevice(_check_device(driver, ordinal))


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGetName(driver: Driver, length: Any, dev: Any) -> bytes:
    """The device's name, NUL-padded to ``length`` as the bindings return it."""
    _check_device(driver, dev)
    if int(length) < 1:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"a name of length {length}")
    return driver.properties.name.encode()[: int(length) - 1].ljust(int(length), b"\0")


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGetUuid(driver: Driver, dev: Any) -> Any:
    """16 bytes, the same for equal devices in every process."""
    _check_device(driver, dev)
    result = cuda.CUuuid()
    ordinal = int(dev)
    name = f"{driver.properties!r} {ordinal}" if ordinal else repr(driver.properties)
    digest = uuid.uuid5(uuid.NAMESPACE_OID, name).bytes
    ctypes.memmove(result.getPtr(), digest, len(digest))  # its bytes attribute is read-only
    return result


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGetPCIBusId(driver: Driver, length: Any, dev: Any) -> bytes:
    """A bus id that no GPU has."""
    _check_device(driver, dev)
    return f"0000:{int(dev):02x}:00.0".encode()[: max(int(length) - 1, 0)].ljust(int(length), b"\0")


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceTotalMem(driver: Driver, dev: Any) -> int:
    """Bytes of device memory."""
    _check_device(driver, dev)
    return driver.properties.total_memory


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceGetAttribute(driver: Driver, attrib: Any, dev: Any) -> int:
    """A property of the posed device; 0 for features it does not have."""
    _check_device(driver, dev)
    attribute = expect_enum("attrib", attrib, cuda.CUdevice_attribute)
    return _attributes(driver.properties).get(int(attribute), 0)


@driver_call(results=1, needs=Needs.INIT)
def cuDevicePrimaryCtxRetain(driver: Driver, dev: Any) -> Any:
    """Retain the primary context, which the first retain creates."""
    ordinal = _check_device(driver, dev)
    if ordinal not in driver.contexts:
        driver.create_context(ordinal)
    context = driver.contexts[ordinal]
    context.references += 1
    return cuda.CUcontext(context.handle)


@driver_call(needs=Needs.INIT, defers=True)
def cuDevicePrimaryCtxRelease(driver: Driver, dev: Any) -> None:
    """Release the primary context; the last release destroys it."""
    ordinal = _check_device(driver, dev)
    context = driver.contexts.get(ordinal)
    if context is None or not context.references:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", "the primary context is not retained")
    context.references -= 1
    if not context.references:
        driver.destroy_context(ordinal)


@driver_call(needs=Needs.INIT, defers=True)
def cuDevicePrimaryCtxReset(driver: Driver, dev: Any) -> None:
    """Destroy the primary context even if retained: all memory and modules are gone."""
    driver.destroy_context(_check_device(driver, dev))


@driver_call(results=2, needs=Needs.INIT)
def cuDevicePrimaryCtxGetState(driver: Driver, dev: Any) -> tuple[int, int]:
    """Flags (none) and whether the context is active."""
    return 0, int(_check_device(driver, dev) in driver.contexts)


@driver_call(needs=Needs.INIT)
def cuCtxSetCurrent(driver: Driver, ctx: Any) -> None:
    """Replace the top of the calling thread's stack; null pops it."""
    number = _check_context(driver, ctx, allow_null=True)
    stack = driver.current_stack
    if stack:
        stack.pop()
    if number:
        stack.append(number)


@driver_call(results=1, needs=Needs.INIT)
def cuCtxGetCurrent(driver: Driver) -> Any:
    """The calling thread's context, null if it has none."""
    return cuda.CUcontext(driver.current_handle)


@driver_call(needs=Needs.INIT)
def cuCtxPushCurrent(driver: Driver, ctx: Any) -> None:
    """Push a context on the calling thread's stack."""
    driver.current_stack.append(_check_context(driver, ctx))


@driver_call(results=1, needs=Needs.INIT)
def cuCtxPopCurrent(driver: Driver) -> Any:
    """Pop the calling thread's stack."""
    if not driver.current_stack:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", "no context to pop")
    return cuda.CUcontext(driver.current_stack.pop())


@driver_call(results=1, needs=Needs.INIT)
def cuCtxGetDevice(driver: Driver) -> Any:
    """The device of the current context."""
    if not driver.current_handle:
        raise Refused("CUDA_ERROR_INVALID_CONTEXT", "no context is current")
    return cuda.CUdevice(driver.context.ordinal)


@driver_call(results=1, needs=Needs.INIT)
def cuDeviceCanAccessPeer(driver: Driver, dev: Any, peerDev: Any) -> int:
    """Whether contexts of one device can access the memory of another: all except itself."""
    return int(_check_device(driver, dev) != _check_device(driver, peerDev))


@driver_call()
def cuCtxEnablePeerAccess(driver: Driver, peerContext: Any, Flags: Any) -> None:
    """Let the current context access the present and future memory of another."""
    peer, context = driver.context_of(handle(peerContext)), driver.context
    if uint(Flags):
        raise Refused("CUDA_ERROR_INVALID_VALUE", "cuCtxEnablePeerAccess takes no flags")
    if peer is context:
        raise Refused("CUDA_ERROR_INVALID_DEVICE", "a context cannot be its own peer")
    if peer.ordinal in context.memory.peers:
        raise Refused("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", f"device {peer.ordinal}")
    context.memory.peers.add(peer.ordinal)


@driver_call()
def cuCtxDisablePeerAccess(driver: Driver, peerContext: Any) -> None:
    """Revoke peer access."""
    peer, peers = driver.context_of(handle(peerContext)), driver.context.memory.peers
    if peer.ordinal not in peers:
        raise Refused("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", f"device {peer.ordinal}")
    peers.remove(peer.ordinal)


@driver_call(results=1)
def cuCtxGetLimit(driver: Driver, limit: Any) -> int:
    """A device-side limit in bytes."""
    name = expect_enum("limit", limit, cuda.CUlimit).name
    if name not in _LIMITS:
        raise Refused("CUDA_ERROR_UNSUPPORTED_LIMIT", name)
    return _LIMITS[name]


@driver_call(results=2)
def cuCtxGetStreamPriorityRange(driver: Driver) -> tuple[int, int]:
    """Least and greatest stream priority."""
    return 0, -5


@functools.cache
def _attributes(properties: DeviceProperties) -> dict[int, int]:
    """Attribute number -> value."""
    named = properties.attributes().items()
    prefix = "CU_DEVICE_ATTRIBUTE_"
    return {int(getattr(cuda.CUdevice_attribute, prefix + name)): value for name, value in named}


def _check_device(driver: Driver, dev: Any) -> int:
    """The ordinal of a device."""
    ordinal, count = int(dev), driver.device_count
    if not 0 <= ordinal < count:
        raise Refused("CUDA_ERROR_INVALID_DEVICE", f"no device {ordinal}: there are {count}")
    return ordinal


def _check_context(driver: Driver, ctx: Any, allow_null: bool = False) -> int:
    number = handle(ctx)
    if number == 0 and allow_null:
        return 0
    return driver.context_of(number).handle
