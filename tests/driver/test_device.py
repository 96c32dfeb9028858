"""Probing, device strings, opening, properties, closing, forking."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import pytest

from urdir.driver import bindings
from urdir.driver.device import Device, native_target, probe, target_for
from urdir.driver.device_name import DeviceName
from urdir.driver.errors import (
    CudaError,
    DeviceNameError,
    DriverError,
    DriverTooOldError,
    LifetimeError,
    NoDeviceError,
    NoDriverError,
)
from urdir.ptxgen.ptx.architecture import OPENED

OK = cuda.CUresult.CUDA_SUCCESS


class DynamicLibNotFoundError(RuntimeError):
    """As cuda.pathfinder raises it."""


def machine(init: str = "CUDA_SUCCESS", version: int = 13000, names: tuple[str, ...] = ()) -> Any:
    """An api that answers what a probe asks."""
    return SimpleNamespace(
        CUresult=cuda.CUresult,
        cuInit=lambda flags: (getattr(cuda.CUresult, init),),
        cuDriverGetVersion=lambda: (OK, version),
        cuDeviceGetCount=lambda: (OK, len(names)),
        cuDeviceGet=lambda i: (OK, i),
        cuDeviceGetName=lambda n, i: (OK, names[i].encode() + b"\0\0"),
    )


def without_driver() -> Any:
    def call(*args: object) -> Any:
        raise DynamicLibNotFoundError('"cuda" is an NVIDIA driver library')

    return bindings.GuardedApi(
        SimpleNamespace(CUresult=cuda.CUresult, cuInit=call, cuDriverGetVersion=call)
    )


@pytest.mark.parametrize(
    ("api", "status", "detail", "error"),
    [
        (machine(names=("H200", "H100")), "ok", "CUDA 13.0, cuda:0 H200, cuda:1 H100", None),
        (without_driver(), "no driver", "libcuda was not found", NoDriverError),
        (machine("CUDA_ERROR_NO_DEVICE"), "no device", "finds no GPU", NoDeviceError),
        (machine("CUDA_ERROR_NO_DEVICE", 12020), "no device", "finds no GPU", NoDeviceError),
        (machine(), "no device", "finds no GPU", NoDeviceError),
        (machine(version=12020, names=("T4",)), "driver too old", "12.2", DriverTooOldError),
        (
            machine("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 12020),
            "driver too old",
            "has CUDA 12.2, needs >= 580 (CUDA 13)",
            DriverTooOldError,
        ),
        (machine("CUDA_ERROR_SYSTEM_NOT_READY"), "error", "fabric manager", CudaError),
    ],
)
def test_probe_tells_machines_apart(
    api: Any, status: str, detail: str, error: type[DriverError] | None
) -> None:
    found = probe(api)
    assert found.status == status
    assert detail in found.detail
    assert "\n" not in found.detail
    assert type(found.error) is (error or type(None))
    if error is not None:
        with pytest.raises(error):
            Device.open("cuda", api=api)


@pytest.mark.parametrize("api", [without_driver(), machine("CUDA_ERROR_NO_DEVICE"), machine()])
def test_auto_takes_the_emulator_only_where_no_gpu_is(api: Any) -> None:
    with Device.open("auto", api=api) as device:
        assert device.is_emulated
        assert "NVIDIA driver" in device.note
        assert ";" not in device.note
        assert "\n" not in device.note


@pytest.mark.parametrize(
    "api", [machine("CUDA_ERROR_SYSTEM_NOT_READY"), machine(version=12020, names=("T4",))]
)
def test_auto_never_replaces_a_gpu_that_fails(api: Any) -> None:
    with pytest.raises(DriverError):
        Device.open("auto", api=api)


def test_index_out_of_range_names_the_count() -> None:
    with pytest.raises(NoDeviceError, match=r"no device cuda:2: this machine has 1 \(.*H200\)"):
        Device.open("cuda:2", api=machine(names=("H200",)))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("auto", DeviceName("auto")),
        ("cuda", DeviceName("cuda", 0)),
        ("cuda:3", DeviceName("cuda", 3)),
        ("emulator", DeviceName("emulator", 0, "sm_90a")),
        ("emulator:sm_75", DeviceName("emulator", 0, "sm_75")),
    ],
)
def test_device_strings(text: str, parsed: DeviceName) -> None:
    assert DeviceName.parse(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "auto:0", "emulator:90", "CUDA", "cuda:0 ", 0, None],
)
def test_bad_device_string_lists_the_forms(text: Any) -> None:
    with pytest.raises(
        DeviceNameError, match="give auto, cuda, cuda:INDEX, emulator or emulator:sm_NN"
    ):
        Device.open(text)


def test_unknown_emulated_target_lists_the_known() -> None:
    with pytest.raises(DeviceNameError, match=r"sm_75, .*sm_90, sm_90a, .*sm_120"):
        Device.open("emulator:sm_61")


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 9), "sm_89"),
        ((8, 8), "sm_87"),
        ((9, 0), "sm_90"),
        ((12, 1), "sm_120"),
    ],
)
def test_target_of_a_capability(capability: tuple[int, int], target: str) -> None:
    assert target_for(capability, "cuda:0") == target


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((8, 8), "sm_87"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a"),
     ((12, 1), "sm_120")],
)  # fmt: skip
def test_native_target_of_a_capability(capability: tuple[int, int], target: str) -> None:
    assert native_target(capability) == target


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (11, 0), (13, 0)])
def test_unsupported_capability(capability: tuple[int, int]) -> None:
    text = rf"cuda:0 has compute capability {capability[0]}\.{capability[1]}, .* supported"
    with pytest.raises(DriverError, match=text):
        target_for(capability, "cuda:0")


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_emulator_poses_as_its_target(sm: int) -> None:
    with Device.open(f"emulator:sm_{sm}") as device:
        assert device.target == f"sm_{sm}"
        assert device.name == f"emulator:sm_{sm}"
        assert device.properties.compute_capability == divmod(sm, 10)
        assert device.properties.max_cluster == (8 if sm >= 90 else 1)


@pytest.mark.parametrize(("name", "native"), [("sm_90", "sm_90"), ("sm_90a", "sm_90a")])
def test_emulator_poses_with_and_without_what_only_hopper_has(name: str, native: str) -> None:
    with Device.open(f"emulator:{name}") as device:
        assert (device.name, device.target) == (f"emulator:{name}", "sm_90")
        assert device.native_target == native
        assert device.properties.compute_capability == (9, 0)
        assert name in device.properties.name


def test_properties_are_plausible(device: Device) -> None:
    p = device.properties
    assert p.name
    assert len(p.uuid) == 32
    assert p.warp_size == 32
    assert p.max_threads_per_block == 1024
    assert p.max_block == (1024, 1024, 64)
    assert p.max_grid == (2**31 - 1, 65535, 65535)
    assert p.sm_count >= 1
    assert p.driver_version >= (13, 0)
    assert p.shared_per_block == 48 * 1024
    assert p.shared_per_block < p.shared_per_block_optin < p.shared_per_sm
    assert p.registers_per_block == 65536
    assert p.cooperative
    assert p.l2_bytes > 0
    free, total = device.memory_info()
    assert 0 < free <= total <= p.total_memory


def test_close_ends_everything_and_may_be_repeated(device: Device) -> None:
    buffer = device.allocate(16, "x")
    held = device.allocate(16, "held")
    held.hold()
    stream = device.create_stream()
    event = stream.record()
    pinned = device.pinned(16, "p")
    device.close()
    device.close()
    assert all(owned.closed for owned in (buffer, held, stream, event, pinned))
    with pytest.raises(LifetimeError, match=f"device {device.name} is closed"):
        device.allocate(16, "y")
    with pytest.raises(LifetimeError, match="buffer 'x' was used after it was closed"):
        buffer.download("u1")
    buffer.close()


@pytest.mark.slow
def test_dropped_device_gives_its_memory_back(emulator: Device) -> None:
    """Two openings share the primary context; each ends what it made."""
    free, _ = emulator.memory_info()
    dropped = Device.open("emulator", api=emulator.api)
    buffer = dropped.allocate(64 << 20, "x")
    assert emulator.memory_info()[0] < free
    del dropped, buffer
    gc.collect()
    assert emulator.memory_info()[0] == free


def test_object_may_move_to_another_thread(device: Device) -> None:
    buffer = device.allocate(4, "x")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            buffer.fill(7)
            device.allocate(16, "y").close()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert buffer.download("u1").tolist() == [7, 7, 7, 7]


def test_two_devices_in_turn(device: Device) -> None:
    """Every call makes its own context current."""
    with Device.open("emulator:sm_80") as other:
        ours, theirs = device.allocate(4, "ours"), other.allocate(4, "theirs")
        for value in (1, 2):
            ours.fill(value)
            theirs.fill(value + 10)
            assert ours.download("u1").tolist() == [value] * 4
            assert theirs.download("u1").tolist() == [value + 10] * 4


def test_finaliser_restores_the_current_context(device: Device) -> None:
    api = device.api
    device.context.make_current()
    buffer = device.allocate(4, "x")
    assert int(api.cuCtxSetCurrent(0)[0]) == 0
    del buffer
    gc.collect()
    assert int(api.cuCtxGetCurrent()[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_gets_a_clear_error(device: Device) -> None:
    buffer = device.allocate(4, "x")
    buffer.fill(3)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, Python 3.12
        child = os.fork()
    if not child:
        try:
            try:
                buffer.download("u1")
            except LifetimeError as exc:
                os.write(write, str(exc).encode())
            buffer.close()  # neither this nor the device's end touches the parent's context
            device.close()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert f"opened in process {os.getpid()}" in message
    assert "forked child" in message
    assert buffer.download("u1").tolist() == [3, 3, 3, 3]


def test_interpreter_exit_with_everything_open_is_silent(device_name: str) -> None:
    script = (
        "from urdir.driver.device import Device\n"
        f"device = Device.open({device_name!r})\n"
        "kept = [device.allocate(16, 'x'), device.create_stream(), device.pinned(16, 'p')]\n"
        "cycle = [kept]; cycle.append(cycle)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("number", OPENED)
def test_the_emulator_poses_as_every_device_that_is_opened(number: int) -> None:
    with Device.open(f"emulator:sm_{number}") as device:
        assert device.properties.compute_capability == divmod(number, 10)


def test_failed_opening_leaves_nothing_retained() -> None:
    api = bindings.emulated()
    api.cuInit(0)
    real_read = api.cuDeviceTotalMem
    api.cuDeviceTotalMem = lambda dev: (cuda.CUresult.CUDA_ERROR_UNKNOWN, None)
    with pytest.raises(CudaError, match="cuDeviceTotalMem"):
        Device.open("emulator", api=api)
    api.cuDeviceTotalMem = real_read
    gpu = api.cuDeviceGet(0)[1]
    assert api.cuDevicePrimaryCtxGetState(gpu)[2] == 0


def test_memory_is_counted_once() -> None:
    """Whatever other processes take meanwhile; not after that."""
    with Device.open("emulator") as device:
        before = device.usable_memory()
        with device.memory_as_it_is():
            taken = device.allocate(1 << 20, "taken")
            assert device.memory_info()[0] < before
            assert device.usable_memory() == before
            device.limit_memory(before // 2)
            assert device.usable_memory() == before // 2
        device.limit_memory(None)
        assert device.usable_memory() == device.memory_info()[0]
        taken.close()
