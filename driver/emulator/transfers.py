"""Allocation, copies and fills."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import (
    Refused,
    driver_call,
    handle,
    host_address,
    size_t,
    uchar,
    uint,
    ushort,
)
from urdir.driver.emulator.copies import Box, Copy, Fill, PeerCopy, Staged, copy_2d, copy_3d
from urdir.driver.emulator.machine.memory import MemoryRangeError, OutOfMemory
from urdir.driver.emulator.scheduler import CallTask, Queue
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.streams import enqueue, stream_of, wait

# ---- allocating ----


@driver_call(results=2)
def cuMemGetInfo(driver: Driver) -> tuple[int, int]:
    """Free and total bytes of device memory."""
    memory = driver.context.memory
    return memory.total - memory.used, memory.total


@driver_call(results=1)
def cuMemAlloc(driver: Driver, bytesize: Any) -> Any:
    """Device memory, contents undefined."""
    return _allocate(driver, size_t(bytesize))


@driver_call(defers=True)
def cuMemFree(driver: Driver, dptr: Any) -> None:
    """Free device memory, after everything queued has run (as the real driver does)."""
    address = handle(dptr)
    if address:
        wait(driver, driver.context.scheduler.finish_all)
        try:
            driver.context.memory.free(address)
        except MemoryRangeError as exc:
            raise Refused("CUDA_ERROR_INVALID_VALUE", str(exc)) from None


@driver_call(results=1)
def cuMemAllocAsync(driver: Driver, bytesize: Any, hStream: Any) -> Any:
    """Device memory; usable at once, whatever the stream has to do first."""
    stream_of(driver, hStream)
    return _allocate(driver, size_t(bytesize))


@driver_call()
def cuMemFreeAsync(driver: Driver, dptr: Any, hStream: Any) -> None:
    """Free device memory when the stream comes to it."""
    address, memory = handle(dptr), driver.context.memory
    if not memory.contains(address, 1):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{address:#x} is not an allocation")
    enqueue(driver, stream_of(driver, hStream), CallTask(lambda: memory.free(address)))


@driver_call(results=2)
def cuMemGetAddressRange(driver: Driver, dptr: Any) -> tuple[Any, int]:
    """Start and size of the allocation that an address belongs to."""
    address, memory = handle(dptr), driver.context.memory
    allocation = memory.find(address)
    if allocation is None:
        raise Refused("CUDA_ERROR_NOT_FOUND", f"{address:#x} is {memory.describe(address)}")
    return cuda.CUdeviceptr(allocation.address), allocation.nbytes


@driver_call(results=1)
def cuMemHostAlloc(driver: Driver, bytesize: Any, Flags: Any) -> int:
    """Page-locked host memory, with the same address on host and device."""
    if uint(Flags) & ~7:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"flags {Flags}")
    return _allocate_host(driver, size_t(bytesize))


@driver_call(results=1)
def cuMemAllocHost(driver: Driver, bytesize: Any) -> int:
    """Page-locked host memory, with the same address on host and device."""
    return _allocate_host(driver, size_t(bytesize))


@driver_call(defers=True)
def cuMemFreeHost(driver: Driver, p: Any) -> None:
    """Free page-locked memory, after everything queued has run."""
    _free_host(driver, p, "CUDA_ERROR_INVALID_VALUE")


@driver_call()
def cuMemHostRegister(driver: Driver, p: Any, bytesize: Any, Flags: Any) -> None:
    """Page-lock memory of the process, from then on with the same address on host and device."""
    address, nbytes = host_address(p), size_t(bytesize)
    if uint(Flags) & ~7 or not nbytes:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{nbytes} bytes, flags {Flags}")
    if code := driver.injections.strike("host_allocation"):
        raise Refused(code, "injected fault")
    driver.context.memory.register_host(address, nbytes)


@driver_call(defers=True)
def cuMemHostUnregister(driver: Driver, p: Any) -> None:
    """End what `cuMemHostRegister` did, after everything queued has run."""
    _free_host(driver, p, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")


def _free_host(driver: Driver, p: Any, unknown: str) -> None:
    """End page-locked memory, after everything queued has run; ``unknown`` is the code for an
    address that is none of its beginnings."""
    wait(driver, driver.context.scheduler.finish_all)
    try:
        driver.context.memory.free_host(host_address(p))
    except MemoryRangeError as exc:
        raise Refused(unknown, str(exc)) from None


@driver_call(results=1)
def cuMemHostGetDevicePointer(driver: Driver, p: Any, Flags: Any) -> Any:
    """The device address of page-locked memory: the same."""
    address = host_address(p)
    if uint(Flags) or not driver.context.memory.is_host(address, 1):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{address:#x} is not page-locked memory")
    return cuda.CUdeviceptr(address)


# ---- copying ----


@driver_call()
def cuMemcpyHtoD(driver: Driver, dstDevice: Any, srcHost: Any, ByteCount: Any) -> None:
    """Copy host to device in the legacy stream, and wait."""
    _copy_run(driver, _device(dstDevice), _host(srcHost), size_t(ByteCount), is_blocking=True)


@driver_call()
def cuMemcpyDtoH(driver: Driver, dstHost: Any, srcDevice: Any, ByteCount: Any) -> None:
    """Copy device to host in the legacy stream, and wait."""
    _copy_run(driver, _host(dstHost), _device(srcDevice), size_t(ByteCount), is_blocking=True)


@driver_call()
def cuMemcpyDtoD(driver: Driver, dstDevice: Any, srcDevice: Any, ByteCount: Any) -> None:
    """Copy within the device in the legacy stream, without waiting."""
    _copy_run(driver, _device(dstDevice), _device(srcDevice), size_t(ByteCount))


@driver_call()
def cuMemcpyPeer(
    driver: Driver,
    dstDevice: Any,
    dstContext: Any,
    srcDevice: Any,
    srcContext: Any,
    ByteCount: Any,
) -> None:
    """Copy from device to device, after all work of the three contexts."""
    copy = _peer_copy(driver, dstDevice, dstContext, srcDevice, srcContext, ByteCount)
    scheduler = driver.context.scheduler
    contexts = (driver.context_of(handle(c)) for c in (dstContext, srcContext))
    after = tuple(task for context in contexts for task in context.scheduler.ends())
    if copy is not None:
        task = scheduler.enqueue(scheduler.legacy, CallTask(copy.run), after)
        wait(driver, scheduler.finish, task)


@driver_call()
def cuMemcpyPeerAsync(
    driver: Driver,
    dstDevice: Any,
    dstContext: Any,
    srcDevice: Any,
    srcContext: Any,
    ByteCount: Any,
    hStream: Any,
) -> None:
    """Queue a copy from device to device."""
    stream = stream_of(driver, hStream)
    copy = _peer_copy(driver, dstDevice, dstContext, srcDevice, srcContext, ByteCount)
    if copy is not None:
        enqueue(driver, stream, CallTask(copy.run))


@driver_call()
def cuMemcpyHtoDAsync(
    driver: Driver, dstDevice: Any, srcHost: Any, ByteCount: Any, hStream: Any
) -> None:
    """Queue a copy host to device: pageable memory is read now, page-locked memory late."""
    _copy_run(driver, _device(dstDevice), _host(srcHost), size_t(ByteCount), hStream)


@driver_call()
def cuMemcpyDtoHAsync(
    driver: Driver, dstHost: Any, srcDevice: Any, ByteCount: Any, hStream: Any
) -> None:
    """Queue a copy device to host, which lands late whatever the host memory is."""
    _copy_run(driver, _host(dstHost), _device(srcDevice), size_t(ByteCount), hStream)


@driver_call()
def cuMemcpyDtoDAsync(
    driver: Driver, dstDevice: Any, srcDevice: Any, ByteCount: Any, hStream: Any
) -> None:
    """Queue a copy within the device."""
    _copy_run(driver, _device(dstDevice), _device(srcDevice), size_t(ByteCount), hStream)


@driver_call()
def cuMemcpy2D(driver: Driver, pCopy: Any) -> None:
    """Copy rows in the legacy stream, and wait."""
    _queue_copy(driver, copy_2d(driver.context.memory, pCopy), None, is_blocking=True)


@driver_call()
def cuMemcpy2DUnaligned(driver: Driver, pCopy: Any) -> None:
    """Copy rows in the legacy stream, and wait."""
    _queue_copy(driver, copy_2d(driver.context.memory, pCopy), None, is_blocking=True)


@driver_call()
def cuMemcpy2DAsync(driver: Driver, pCopy: Any, hStream: Any) -> None:
    """Queue a copy of rows."""
    _queue_copy(driver, copy_2d(driver.context.memory, pCopy), hStream)


@driver_call()
def cuMemcpy3D(driver: Driver, pCopy: Any) -> None:
    """Copy planes of rows in the legacy stream, and wait."""
    _queue_copy(driver, copy_3d(driver.context.memory, pCopy), None, is_blocking=True)


@driver_call()
def cuMemcpy3DAsync(driver: Driver, pCopy: Any, hStream: Any) -> None:
    """Queue a copy of planes of rows."""
    _queue_copy(driver, copy_3d(driver.context.memory, pCopy), hStream)


# ---- filling ----


@driver_call()
def cuMemsetD8(driver: Driver, dstDevice: Any, uc: Any, N: Any) -> None:
    """Fill with a byte in the legacy stream, without waiting."""
    _fill(driver, dstDevice, uchar(uc), 1, size_t(N))


@driver_call()
def cuMemsetD16(driver: Driver, dstDevice: Any, us: Any, N: Any) -> None:
    """Fill with a 16-bit value in the legacy stream, without waiting."""
    _fill(driver, dstDevice, ushort(us), 2, size_t(N))


@driver_call()
def cuMemsetD32(driver: Driver, dstDevice: Any, ui: Any, N: Any) -> None:
    """Fill with a 32-bit value in the legacy stream, without waiting."""
    _fill(driver, dstDevice, uint(ui), 4, size_t(N))


@driver_call()
def cuMemsetD8Async(driver: Driver, dstDevice: Any, uc: Any, N: Any, hStream: Any) -> None:
    """Queue a fill with a byte."""
    _fill(driver, dstDevice, uchar(uc), 1, size_t(N), hStream)


@driver_call()
def cuMemsetD16Async(driver: Driver, dstDevice: Any, us: Any, N: Any, hStream: Any) -> None:
    """Queue a fill with a 16-bit value."""
    _fill(driver, dstDevice, ushort(us), 2, size_t(N), hStream)


@driver_call()
def cuMemsetD32Async(driver: Driver, dstDevice: Any, ui: Any, N: Any, hStream: Any) -> None:
    """Queue a fill with a 32-bit value."""
    _fill(driver, dstDevice, uint(ui), 4, size_t(N), hStream)


# ---- helpers ----


def _allocate(driver: Driver, nbytes: int) -> Any:
    context = driver.context
    return cuda.CUdeviceptr(_checked(driver, "allocation", context.memory.allocate, nbytes))


def _allocate_host(driver: Driver, nbytes: int) -> int:
    return _checked(driver, "host_allocation", driver.context.memory.allocate_host, nbytes)


def _checked(driver: Driver, kind: str, allocate: Callable[[int], int], nbytes: int) -> int:
    if not nbytes:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "an allocation of 0 bytes")
    if code := driver.injections.strike(kind):
        raise Refused(code, "injected fault")
    try:
        return allocate(nbytes)
    except OutOfMemory as exc:
        raise Refused("CUDA_ERROR_OUT_OF_MEMORY", str(exc)) from None


def _peer_copy(
    driver: Driver, to: Any, target: Any, start: Any, source: Any, count: Any
) -> PeerCopy | None:
    """A copy between contexts; None when it is empty."""
    memories = [driver.context_of(handle(context)).memory for context in (target, source)]
    nbytes = size_t(count)
    if not nbytes:
        return None
    copy = PeerCopy(memories[0], handle(to), memories[1], handle(start), nbytes)
    copy.check()
    return copy


def _device(value: Any) -> tuple[bool, int, Any]:
    return True, handle(value), None


def _host(value: Any) -> tuple[bool, int, Any]:
    return False, host_address(value), value


def _copy_run(
    driver: Driver,
    target: tuple[bool, int, Any],
    source: tuple[bool, int, Any],
    nbytes: int,
    hStream: Any = None,
    is_blocking: bool = False,
) -> None:
    """A copy of one run of bytes."""
    to = Box(target[1], nbytes, is_device=target[0])
    copy = Copy(to, Box(source[1], nbytes, is_device=source[0]), keep=(target[2], source[2]))
    _queue_copy(driver, copy if nbytes else None, hStream, is_blocking)


def _queue_copy(driver: Driver, copy: Copy | None, hStream: Any, is_blocking: bool = False) -> None:
    stream = stream_of(driver, hStream)
    if copy is None:
        return
    memory = driver.context.memory
    copy.check(memory)
    source = copy.source
    is_staged = not source.is_device and not memory.is_host(source.address, source.span)
    work: Copy | Staged = copy.staged(memory) if is_staged and not is_blocking else copy
    task = enqueue(driver, stream, CallTask(lambda: work.run(memory)))
    if is_blocking:
        wait(driver, driver.context.scheduler.finish, task)


def _fill(
    driver: Driver, dstDevice: Any, value: int, size: int, count: int, hStream: Any = None
) -> None:
    stream: Queue = stream_of(driver, hStream)
    if not count:
        return
    memory = driver.context.memory
    fill = Fill(Box(handle(dstDevice), count * size, True), value, size)
    fill.check(memory)
    enqueue(driver, stream, CallTask(lambda: fill.run(memory)))
