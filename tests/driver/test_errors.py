"""check(): status to typed error; what a poisoned context says, on the emulator and on a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import MEANINGS, STICKY, CudaError, DriverError, check
from urdir.driver.launch import launch, pack

STATUS = cuda.CUresult


@pytest.fixture
def api() -> Any:
    return SimpleNamespace(CUresult=STATUS)


def test_success_gives_the_values(api: Any) -> None:
    assert check(api, (STATUS.CUDA_SUCCESS,), "x") is None
    assert check(api, (STATUS.CUDA_SUCCESS, 7), "x") == 7
    assert check(api, (STATUS.CUDA_SUCCESS, 7, 8), "x") == (7, 8)


def test_error_has_name_code_meaning_and_call(api: Any) -> None:
    with pytest.raises(CudaError) as caught:
        check(api, (STATUS.CUDA_ERROR_INVALID_DEVICE, None), "cuDeviceGet 5")
    error = caught.value
    assert isinstance(error, DriverError)
    assert (error.name, error.code) == ("CUDA_ERROR_INVALID_DEVICE", 101)
    assert error.call == "cuDeviceGet 5"
    assert not error.sticky
    assert str(error) == (
        "cuDeviceGet 5: CUDA_ERROR_INVALID_DEVICE (101): there is no GPU with this index"
    )


def test_status_that_the_bindings_do_not_know(api: Any) -> None:
    with pytest.raises(CudaError, match=r"cuX: CUresult 54321 \(54321\)$"):
        check(api, (54321,), "cuX")


def test_tables_name_real_statuses() -> None:
    names = {status.name for status in STATUS}
    assert set(MEANINGS) <= names
    assert names >= STICKY


def test_later_sticky_errors_name_the_first(api: Any) -> None:
    api.last_fault = "kernel k, line 3: store to 0x10"
    fault = (STATUS.CUDA_ERROR_ILLEGAL_ADDRESS,)
    with pytest.raises(CudaError, match=r"context is poisoned.*\nkernel k, line 3") as first:
        check(api, fault, "cuStreamSynchronize")
    assert first.value.sticky
    with pytest.raises(CudaError, match=r"poisoned.*first reported by cuStreamSynchronize"):
        check(api, fault, "cuMemAlloc")


POISON = """
    import sys
    import numpy as np
    from urdir.driver.device import Device
    from urdir.driver.errors import CudaError
    from urdir.driver.launch import launch, pack
    sys.path.insert(0, {folder!r})
    import conftest

    with Device.open({name!r}) as device, device.create_stream() as stream:
        kernel = conftest.TextKernel()
        buffer = device.allocate(4000, "x")
        x, y = buffer, device.allocate(4000, "y")
        x.fill(0)
        args = pack(kernel, dict(x=x, n=1000, y=y, scale=1.0))
        args._storage[16:24] = (0x10).to_bytes(8, "little")  # y: no allocation there
        loaded = device.load(kernel)
        launch(loaded, args, stream)
        calls = (stream.synchronize, lambda: device.allocate(16, "later"),
                 lambda: x.download("f4"), lambda: x.upload(np.zeros(4)),
                 lambda: launch(loaded, args, stream))
        for call in calls:
            try:
                call()
                print("no error")
            except CudaError as exc:
                print(exc.sticky, exc.name, "first reported by" in str(exc))
        buffer.close()
        buffer.close()
    print("closed")
"""


@pytest.mark.slow
def test_poisoned_context_says_so_and_can_be_closed(device_name: str, request: Any) -> None:
    """In a process of its own: a GPU's context does not recover within one."""
    script = textwrap.dedent(POISON).format(name=device_name, folder=str(request.path.parent))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.stderr == ""
    first, *later, closed = result.stdout.splitlines()
    assert first == "True CUDA_ERROR_ILLEGAL_ADDRESS False"
    assert later == ["True CUDA_ERROR_ILLEGAL_ADDRESS True"] * 4
    assert closed == "closed"


def test_reopened_device_is_healthy(emulator: Device, make_kernel: Any) -> None:
    """Releasing the last reference ends the poisoned context (a GPU's driver may refuse)."""
    kernel = make_kernel()
    stream = emulator.create_stream()
    x, y = emulator.allocate(4000, "x"), emulator.allocate(4000, "y")
    x.fill(0)
    emulator.api.inject("launch")
    launch(emulator.load(kernel), pack(kernel, {"x": x, "n": 1, "y": y, "scale": 1}), stream)
    with pytest.raises(CudaError, match=r"cuStreamSynchronize.*poisoned"):
        stream.synchronize()
    emulator.close()
    with Device.open("emulator") as again:
        again.allocate(16, "x").close()
