"""Allocations, copies, fills, page-locked memory."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

from urdir.driver.emulator.scheduler import CallTask

HOST = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
DEVICE = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE


def test_allocations_count(make_bench: Any) -> None:
    bench = make_bench(total_memory=1 << 20)
    api = bench.api
    address = bench.ok(api.cuMemAlloc(3 << 18))
    assert bench.ok(api.cuMemGetInfo()) == (1 << 18, 1 << 20)
    assert int(address) % 256 == 0
    bench.fails(api.cuMemAlloc(1 << 19), "OUT_OF_MEMORY")
    bench.fails(api.cuMemAlloc(0), "INVALID_VALUE")
    base, size = bench.ok(api.cuMemGetAddressRange(int(address) + 17))
    assert (int(base), size) == (int(address), 3 << 18)
    bench.ok(api.cuMemFree(address))
    bench.fails(api.cuMemFree(address), "INVALID_VALUE")
    bench.ok(api.cuMemFree(0))
    assert bench.ok(api.cuMemGetInfo())[0] == 1 << 20


def test_injected_allocation_failures(bench: Any) -> None:
    bench.api.inject("allocation", nth=2)
    bench.api.inject("host_allocation")
    bench.ok(bench.api.cuMemAlloc(4))
    bench.fails(bench.api.cuMemAlloc(4), "OUT_OF_MEMORY")
    bench.ok(bench.api.cuMemAlloc(4))
    bench.fails(bench.api.cuMemHostAlloc(4, 0), "OUT_OF_MEMORY")
    bench.ok(bench.api.cuMemHostAlloc(4, 0))
    with pytest.raises(ValueError, match="no fault"):
        bench.api.inject("earthquake")


def test_copies_stay_inside_allocations(bench: Any) -> None:
    api = bench.api
    address = bench.upload(np.arange(16, dtype=np.uint8))
    host = np.zeros(32, np.uint8)
    bench.fails(api.cuMemcpyHtoD(address, host, 17), "INVALID_VALUE")
    bench.fails(api.cuMemcpyDtoH(host, address - 1, 2), "INVALID_VALUE")
    bench.fails(api.cuMemcpyHtoD(host.ctypes.data, host, 1), "INVALID_VALUE")
    bench.fails(api.cuMemcpyHtoD(address, 0, 4), "INVALID_VALUE")
    bench.fails(api.cuMemsetD8(address + 8, 0, 9), "INVALID_VALUE")
    bench.fails(api.cuMemsetD32(address + 2, 0, 1), "INVALID_VALUE")
    bench.ok(api.cuMemcpyHtoD(0, 0, 0))
    bench.ok(api.cuMemcpyDtoD(address + 8, address, 8))
    assert bench.download(address, host[:16]).tolist() == [*range(8), *range(8)]


def test_fills(bench: Any) -> None:
    api = bench.api
    address = bench.upload(np.zeros(12, np.uint8))
    bench.ok(api.cuMemsetD8(address, 0xAB, 3))
    bench.ok(api.cuMemsetD16(address + 4, 0x1234, 1))
    bench.ok(api.cuMemsetD32(address + 8, 0xDEADBEEF, 1))
    found = bench.download(address, np.empty(12, np.uint8)).tobytes()
    assert found == bytes.fromhex("ababab00 34120000 efbeadde")


@pytest.mark.parametrize("call", ["cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy2DAsync"])
def test_two_dimensional_copies(bench: Any, call: str) -> None:
    """Rows 1 to 3, columns 2 to 7 of a 5 x 9 host array, to row 1 column 3 of a 6 x 16 area."""
    rng = np.random.default_rng(1)
    host = rng.integers(0, 255, (5, 9), np.uint8)
    address = bench.upload(np.zeros((6, 16), np.uint8))
    p = cuda.CUDA_MEMCPY2D()
    p.srcMemoryType, p.srcHost, p.srcPitch = HOST, host, 9
    p.srcXInBytes, p.srcY = 2, 1
    p.dstMemoryType, p.dstDevice, p.dstPitch = DEVICE, cuda.CUdeviceptr(address), 16
    p.dstXInBytes, p.dstY = 3, 1
    p.WidthInBytes, p.Height = 6, 3
    function = getattr(bench.api, call)
    bench.ok(function(p, 0) if call.endswith("Async") else function(p))
    expected = np.zeros((6, 16), np.uint8)
    expected[1:4, 3:9] = host[1:4, 2:8]
    assert (bench.download(address, expected) == expected).all()
    back = np.zeros((3, 6), np.uint8)
    p.srcMemoryType, p.srcDevice, p.srcPitch, p.srcXInBytes = (
        DEVICE,
        cuda.CUdeviceptr(address),
        16,
        3,
    )
    p.dstMemoryType, p.dstHost, p.dstPitch = HOST, back, 6
    p.dstXInBytes = p.dstY = 0
    bench.ok(bench.api.cuMemcpy2D(p))
    assert (back == host[1:4, 2:8]).all()


def test_bad_two_dimensional_copies(bench: Any) -> None:
    address = bench.upload(np.zeros(64, np.uint8))
    host = np.zeros(64, np.uint8)
    p = cuda.CUDA_MEMCPY2D()
    bench.ok(bench.api.cuMemcpy2D(p))  # nothing to copy
    p.WidthInBytes, p.Height = 16, 4
    bench.fails(bench.api.cuMemcpy2D(p), "INVALID_VALUE")
    p.srcMemoryType, p.srcHost, p.srcPitch = HOST, host, 16
    p.dstMemoryType, p.dstDevice, p.dstPitch = DEVICE, cuda.CUdeviceptr(address), 8
    bench.fails(bench.api.cuMemcpy2D(p), "INVALID_VALUE")
    p.dstPitch = 17
    bench.fails(bench.api.cuMemcpy2D(p), "INVALID_VALUE")
    p.dstPitch = 16
    bench.ok(bench.api.cuMemcpy2D(p))


def test_three_dimensional_copies(bench: Any) -> None:
    """A 2 x 3 x 5 corner of a 4 x 6 x 8 host array to the end of a 3 x 4 x 7 area."""
    host = np.random.default_rng(2).integers(0, 255, (4, 6, 8), np.uint8)
    address = bench.upload(np.zeros((3, 4, 7), np.uint8))
    p = cuda.CUDA_MEMCPY3D()
    p.srcMemoryType, p.srcHost, p.srcPitch, p.srcHeight = HOST, host, 8, 6
    p.srcXInBytes, p.srcY, p.srcZ = 3, 2, 1
    p.dstMemoryType, p.dstDevice = DEVICE, cuda.CUdeviceptr(address)
    p.dstPitch, p.dstHeight = 7, 4
    p.dstXInBytes, p.dstY, p.dstZ = 2, 1, 1
    p.WidthInBytes, p.Height, p.Depth = 5, 3, 2
    bench.ok(bench.api.cuMemcpy3D(p))
    expected = np.zeros((3, 4, 7), np.uint8)
    expected[1:3, 1:4, 2:7] = host[1:3, 2:5, 3:8]
    assert (bench.download(address, expected) == expected).all()
    p.dstHeight = 3
    bench.fails(bench.api.cuMemcpy3D(p), "INVALID_VALUE")
    p.dstHeight, p.srcPitch = 4, 0
    bench.fails(bench.api.cuMemcpy3D(p), "INVALID_VALUE")


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_late(bench: Any) -> None:
    api, stream = bench.api, bench.stream()
    to = bench.upload(np.zeros(4, np.uint32))
    pageable = np.full(4, 1, np.uint32)
    bench.ok(api.cuMemcpyHtoDAsync(to, pageable, 16, stream))
    pageable[:] = 2
    bench.synchronize(stream)
    assert bench.download(to, pageable).tolist() == [1] * 4
    address, pinned = bench.pinned(4)
    pinned[:] = 3
    bench.ok(api.cuMemcpyHtoDAsync(to, address, 16, stream))
    pinned[:] = 4
    bench.synchronize(stream)
    assert bench.download(to, pageable).tolist() == [4] * 4


def test_downloads_land_late(bench: Any) -> None:
    stream = bench.stream()
    source = bench.upload(np.full(4, 7, np.uint32))
    for host in (np.zeros(4, np.uint32), bench.pinned(4)[1]):
        bench.ok(bench.api.cuMemcpyDtoHAsync(host.ctypes.data, source, 16, stream))
        assert host.tolist() == [0] * 4
        bench.synchronize(stream)
        assert host.tolist() == [7] * 4


def test_pinned_memory_has_one_address(bench: Any) -> None:
    api = bench.api
    address, array = bench.pinned(8)
    assert int(bench.ok(api.cuMemHostGetDevicePointer(address, 0))) == address
    array[:] = np.arange(8)
    out = bench.upload(np.zeros(8, np.uint32))
    bench.ok(bench.launch("add", bench.add(address, out, 8, 10)))
    bench.ok(bench.launch("add", bench.add(out, address, 8, 100)))
    bench.ok(api.cuCtxSynchronize())
    assert array.tolist() == list(range(110, 118))
    bench.ok(api.cuMemFreeHost(address))
    bench.fails(api.cuMemFreeHost(address), "INVALID_VALUE")
    bench.fails(api.cuMemHostGetDevicePointer(address, 0), "INVALID_VALUE")
    again = [bench.pinned(8)[0] for _ in range(20)]
    for item in again:
        bench.ok(api.cuMemFreeHost(item))


def test_freeing_waits_for_queued_work(bench: Any) -> None:
    x = bench.upload(np.arange(4, dtype=np.uint32))
    y = bench.upload(np.zeros(4, np.uint32))
    bench.ok(bench.launch("add", bench.add(x, y, 4, 1), bench.stream(1)))
    bench.ok(bench.api.cuMemFree(x))
    assert bench.download(y, np.zeros(4, np.uint32)).tolist() == [1, 2, 3, 4]


def test_a_finaliser_may_free_in_the_middle_of_another_call(bench: Any) -> None:
    """As the garbage collector does: any time, in the thread that is just running a kernel."""
    x, y = bench.upload(np.zeros(4, np.uint32)), bench.upload(np.zeros(4, np.uint32))
    stream, driver = bench.stream(), bench.api._driver
    results = []
    task = CallTask(lambda: results.append(bench.api.cuMemFree(x)))
    bench.ok(bench.launch("add", bench.add(x, y, 4, 1), stream))
    driver.context.scheduler.enqueue(driver.context.streams[stream], task)
    bench.ok(bench.launch("add", bench.add(x, y, 4, 2), stream))
    bench.ok(bench.api.cuStreamSynchronize(stream))
    assert results == [(cuda.CUresult.CUDA_SUCCESS,)]
    assert bench.download(y, np.zeros(4, np.uint32)).tolist() == [2] * 4
    bench.fails(bench.api.cuMemFree(x), "INVALID_VALUE")  # it is free by now


def test_stream_ordered_allocation(bench: Any) -> None:
    api, stream = bench.api, bench.stream()
    address = bench.ok(api.cuMemAllocAsync(64, stream))
    bench.ok(api.cuMemsetD8Async(address, 5, 64, stream))
    bench.ok(api.cuMemFreeAsync(address, stream))
    bench.synchronize(stream)
    bench.fails(api.cuMemsetD8(address, 0, 1), "INVALID_VALUE")


def test_reading_what_was_never_written_is_a_fault(bench: Any) -> None:
    x = int(bench.ok(bench.api.cuMemAlloc(128)))
    y = bench.upload(np.zeros(32, np.uint32))
    bench.ok(bench.api.cuMemsetD8(x, 0, 64))
    bench.ok(bench.launch("add", bench.add(x, y, 16, 1)))
    bench.ok(bench.api.cuCtxSynchronize())
    bench.ok(bench.launch("add", bench.add(x, y, 17, 1)))
    bench.fails(bench.api.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    assert "never-written" in bench.api.last_fault
