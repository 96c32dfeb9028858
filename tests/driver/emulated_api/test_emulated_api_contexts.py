"""Initialisation, devices, the primary context, current contexts, injected failures."""

from __future__ import annotations

import threading
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

from urdir.driver.emulator.api import Api


def test_nothing_works_before_initialisation() -> None:
    api = Api()
    assert api.cuDeviceGetCount() == (cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
    assert api.cuMemAlloc(4)[0].name == "CUDA_ERROR_NOT_INITIALIZED"
    assert api.cuDriverGetVersion() == (cuda.CUresult.CUDA_SUCCESS, 13000)
    assert api.cuInit(1)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert api.cuInit(0) == (cuda.CUresult.CUDA_SUCCESS,)
    assert api.cuDeviceGetCount() == (cuda.CUresult.CUDA_SUCCESS, 1)


def test_no_device() -> None:
    api = Api()
    api.inject("init")
    assert api.cuInit(0)[0].name == "CUDA_ERROR_NO_DEVICE"
    assert api.cuDeviceGetCount()[0].name == "CUDA_ERROR_NOT_INITIALIZED"


def test_function_that_an_old_driver_lacks() -> None:
    api = Api()
    api.remove("cuGraphAddNode")
    with pytest.raises(RuntimeError, match="cuGraphAddNode is not found"):
        api.cuGraphAddNode(0, None, None, 0, None)
    with pytest.raises(ValueError, match="cuNothing"):
        api.remove("cuNothing")


@pytest.mark.parametrize(
    ("target", "capability", "optin"),
    [
        ("sm_75", (7, 5), 65536),
        ("sm_80", (8, 0), 166912),
        ("sm_90", (9, 0), 232448),
        ("sm_100", (10, 0), 232448),
        ("sm_120", (12, 0), 101376),
    ],
)
def test_attributes_follow_the_posed_target(
    make_bench: Any, target: str, capability: tuple[int, int], optin: int
) -> None:
    bench = make_bench(target=target, sm_count=7, total_memory=1 << 30)
    attribute = cuda.CUdevice_attribute

    def get(name: str) -> int:
        member = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(bench.ok(bench.api.cuDeviceGetAttribute(member, bench.device)))

    major, minor = get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")
    assert (major, minor) == capability
    assert get("MULTIPROCESSOR_COUNT") == 7
    assert get("MAX_SHARED_MEMORY_PER_BLOCK") == get("SHARED_MEMORY_PER_BLOCK") == 49152
    assert get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") == optin
    assert get("WARP_SIZE") == 32
    assert get("CLUSTER_LAUNCH") == int(capability >= (9, 0))
    assert get("INTEGRATED") == 0
    assert bench.ok(bench.api.cuDeviceTotalMem(bench.device)) == 1 << 30
    name = bench.ok(bench.api.cuDeviceGetName(64, bench.device))
    assert len(name) == 64
    assert target.encode() in name
    uuid = bench.ok(bench.api.cuDeviceGetUuid(bench.device)).bytes
    assert (
        uuid
        == make_bench(target=target, sm_count=7, total_memory=1 << 30)
        .ok(bench.api.cuDeviceGetUuid(bench.device))
        .bytes
    )


def test_bad_devices(bench: Any) -> None:
    bench.fails(bench.api.cuDeviceGet(1), "INVALID_DEVICE")
    bench.fails(bench.api.cuDeviceTotalMem(3), "INVALID_DEVICE")
    with pytest.raises(ValueError, match="sm_60"):
        Api(target="sm_60")


def test_error_names() -> None:
    api = Api()
    error = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert api.cuGetErrorName(error)[1] == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    assert b"illegal memory access" in api.cuGetErrorString(error)[1]
    assert api.cuGetErrorName(12345)[0].name == "CUDA_ERROR_INVALID_VALUE"


def test_current_context_is_a_stack_of_each_thread(bench: Any) -> None:
    api = bench.api
    seen: list[Any] = []

    def other_thread() -> None:
        seen.append(int(bench.ok(api.cuCtxGetCurrent())))
        seen.append(api.cuMemAlloc(4)[0].name)
        bench.ok(api.cuCtxPushCurrent(bench.context))
        seen.append(api.cuMemAlloc(4)[0].name)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == [0, "CUDA_ERROR_INVALID_CONTEXT", "CUDA_SUCCESS"]
    bench.ok(api.cuCtxPushCurrent(bench.context))
    assert bench.ok(api.cuCtxPopCurrent()) == bench.context
    assert bench.ok(api.cuCtxGetCurrent()) == bench.context
    assert int(bench.ok(api.cuCtxGetDevice())) == 0
    bench.ok(api.cuCtxSetCurrent(0))
    assert int(bench.ok(api.cuCtxGetCurrent())) == 0
    bench.fails(api.cuCtxPopCurrent(), "INVALID_CONTEXT")
    bench.fails(api.cuCtxSetCurrent(123), "INVALID_CONTEXT")


def test_last_release_ends_the_context(bench: Any) -> None:
    api = bench.api
    address = bench.upload(np.ones(100, np.uint8))
    assert bench.ok(api.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    again = bench.ok(api.cuDevicePrimaryCtxRetain(0))
    assert again == bench.context
    bench.ok(api.cuDevicePrimaryCtxRelease(0))
    bench.ok(api.cuMemsetD8(address, 0, 100))
    bench.ok(api.cuDevicePrimaryCtxRelease(0))
    assert bench.ok(api.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    bench.fails(api.cuMemsetD8(address, 0, 100), "CONTEXT_IS_DESTROYED")
    bench.fails(api.cuDevicePrimaryCtxRelease(0), "INVALID_CONTEXT")
    bench.ok(api.cuDevicePrimaryCtxRetain(0))
    bench.ok(api.cuCtxSetCurrent(bench.context))
    free, total = bench.ok(api.cuMemGetInfo())
    assert free == total
    bench.fails(api.cuMemsetD8(address, 0, 100), "INVALID_VALUE")


def test_reset_heals_a_poisoned_context(bench: Any) -> None:
    api = bench.api
    api.inject("launch", code="CUDA_ERROR_MISALIGNED_ADDRESS")
    x = bench.upload(np.zeros(4, np.uint32))
    bench.ok(bench.launch("add", bench.add(x, x, 4, 1)))
    bench.fails(api.cuCtxSynchronize(), "MISALIGNED_ADDRESS")
    bench.fails(api.cuMemAlloc(4), "MISALIGNED_ADDRESS")
    bench.ok(api.cuDevicePrimaryCtxReset(0))
    bench.ok(api.cuDevicePrimaryCtxRetain(0))
    bench.ok(api.cuCtxSetCurrent(bench.context))
    bench.ok(api.cuMemAlloc(4))


def test_two_drivers_share_nothing(make_bench: Any) -> None:
    one, two = make_bench(), make_bench(target="sm_80")
    address = one.upload(np.ones(4, np.uint8))
    two.fails(two.api.cuMemsetD8(address, 0, 4), "INVALID_VALUE")


@pytest.mark.parametrize(
    ("kind", "nth", "code", "says"),
    [
        ("cuFoo", 1, None, "no fault 'cuFoo'"),
        ("launch", 0, None, "counted from 1"),
        ("launch", 1, "CUDA_ERROR_FOO", "no error 'CUDA_ERROR_FOO'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(
    kind: str, nth: int, code: str | None, says: str
) -> None:
    api = Api()
    with pytest.raises(ValueError, match=says):
        api.inject(kind, nth, code)
    assert api.pending_faults() == ()
