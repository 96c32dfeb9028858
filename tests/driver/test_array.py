"""Memory shared with other libraries: refused on an emulator, laid out as DLPack says, ordered."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from urdir.driver import array
from urdir.driver.array import DeviceArray, borrow
from urdir.driver.device import Device
from urdir.driver.errors import LifetimeError, TransferError
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.kernels.add import Add

VALUES = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)


@pytest.fixture
def posing(urdir_emulator: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """An emulator that does not say that it is one, to see both ends of an exchange."""
    monkeypatch.setattr(urdir_emulator, "is_emulated", False)
    return urdir_emulator


def test_an_emulators_memory_is_refused(urdir_emulator: Device) -> None:
    """A capsule of kDLCPU would be a lie, one of kDLCUDA an address that no GPU knows."""
    with urdir_emulator.allocate(64, "x") as x:
        shared = DeviceArray(x, np.float32, (16,))
        for use in (
            lambda: np.from_dlpack(shared),  # type: ignore[arg-type]
            lambda: shared.__cuda_array_interface__,
            lambda: borrow(urdir_emulator, VALUES),
        ):
            with pytest.raises(TransferError, match=r"memory of emulator.* can be shared with no"):
                use()
        with pytest.raises(TransferError, match=r"it needs 68 bytes, there are 64"):
            DeviceArray(x, np.float32, (17,))


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "f2", "f4", "f8", "?"])
def test_numpy_reads_the_layout(
    posing: Device, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Numpy is an independent reader of capsules, of host memory: here the address is of such."""
    host = np.arange(30).astype(dtype).reshape(5, 2, 3)
    with posing.allocate(host.nbytes + 4, "x") as x:
        monkeypatch.setattr(type(x), "address", host.ctypes.data)
        monkeypatch.setattr(array, "CUDA", 1)
        seen = np.from_dlpack(DeviceArray(x, dtype, host.shape))  # type: ignore[arg-type]
        np.testing.assert_array_equal(seen, host)
        assert (seen.ctypes.data, seen.dtype) == (host.ctypes.data, host.dtype)
        with pytest.raises(LifetimeError, match="arrays of other libraries"):
            x.close()
        del seen
        gc.collect()


def test_a_buffer_goes_out_and_comes_in(posing: Device) -> None:
    spec, buffers = Add(n=15), [posing.allocate(60, name) for name in "xy"]
    x, y = buffers
    x.upload(VALUES)
    shared = DeviceArray(x, np.float32, (3, 5))
    capsules = [shared.__dlpack__()]  # one that nobody consumes
    with borrow(posing, shared) as other, posing.create_stream() as stream:
        assert (other.address, other.nbytes) == (x.address, 60)
        with pytest.raises(LifetimeError):
            x.close()
        launch(posing.load(spec), pack(spec, {"a": other, "b": x, "y": y}), stream)
    np.testing.assert_array_equal(y.download(np.float32, (3, 5)), 2 * VALUES)
    with pytest.raises(LifetimeError):
        x.close()
    capsules.clear()
    x.close()
    y.close()
    assert not array._exported


class OfInterface:
    """As cupy's arrays are: the interface alone."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def test_the_array_interface_comes_in(posing: Device) -> None:
    with posing.allocate(64, "x") as x, posing.create_stream() as stream:
        x.upload(np.arange(16, dtype=np.float32))
        shared = DeviceArray(x, np.float32, (2, 8)).__cuda_array_interface__
        assert shared["typestr"] == "<f4"
        with borrow(posing, OfInterface({**shared, "stream": int(stream.handle)})) as other:
            np.testing.assert_array_equal(other.download(np.float32), np.arange(16))
        for strides, shape in (((4, 8), (2, 8)), ((64, 4), (2, 8))):
            with pytest.raises(TransferError, match="not C-contiguous"):
                borrow(posing, OfInterface({**shared, "strides": strides, "shape": shape}))
        with pytest.raises(TransferError, match="the array is empty"):
            borrow(posing, OfInterface({**shared, "shape": (0, 8)}))


def test_a_consumers_stream_waits(posing: Device) -> None:
    """Work of a stream that is not blocking runs after what was queued before the export."""
    spec, api = Add(n=4096), posing.api
    names = ("a", "b", "y", "copy")
    a, b, y, copy = (posing.allocate(4 * 4096, name) for name in names)
    a.upload(np.ones(4096, np.float32))
    b.upload(np.ones(4096, np.float32))
    _, other = api.cuStreamCreate(int(api.CUstream_flags.CU_STREAM_NON_BLOCKING))
    with posing.create_stream() as stream:
        launch(posing.load(spec), pack(spec, {"a": a, "b": b, "y": y}), stream)
        capsule = DeviceArray(y, np.float32, (4096,)).__dlpack__(stream=int(other))
        api.cuMemcpyDtoDAsync(copy.address, y.address, y.nbytes, other)
        api.cuStreamSynchronize(other)
    np.testing.assert_array_equal(copy.download(np.float32), np.full(4096, 2, np.float32))
    del capsule
    api.cuStreamDestroy(other)


def test_what_cannot_be_shared(posing: Device) -> None:
    with posing.allocate(64, "x") as x:
        shared = DeviceArray(x, np.float32, (16,))
        for refused in ({"copy": True}, {"dl_device": (1, 0)}, {"stream": 0}):
            with pytest.raises(BufferError):
                shared.__dlpack__(**refused)  # type: ignore[arg-type]
        with pytest.raises(BufferError, match="no type for complex64"):
            DeviceArray(x, np.complex64, (2,)).__dlpack__()
        with pytest.raises(TransferError, match="use from_dlpack"):
            _ = DeviceArray(x, "bf16", (2,)).__cuda_array_interface__
        with pytest.raises(TransferError, match=r"on DLPack device \(1, 0\)"):
            borrow(posing, VALUES)
        with pytest.raises(TransferError, match="list has neither"):
            borrow(posing, [1.0])


@pytest.mark.urdir_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_torch_shares_memory(urdir_gpu: Device, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    named = "bf16" if dtype == "bfloat16" else dtype
    with urdir_gpu.allocate(4 * 15, "x") as x:
        x.fill(0)
        tensor = torch.from_dlpack(DeviceArray(x, named, (3, 5)))
        assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (x.address, kind, (3, 5))
        tensor += 7
        size = tensor.element_size()
        seen = torch.frombuffer(bytearray(x.download(np.uint8, 15 * size)), dtype=kind)
        assert (seen == 7).all()
        del tensor
        if named != "bf16":
            other = torch.as_tensor(DeviceArray(x, named, (15,)), device="cuda")
            assert other.data_ptr() == x.address
            assert (other == 7).all()


@pytest.mark.urdir_gpu
def test_torch_memory_is_launched_upon(urdir_gpu: Device) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    spec = Add(n=1 << 20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        a = torch.randn(1 << 20, device="cuda")
        for _ in range(50):
            a = a * 1.5 - a / 2  # equal to a but for rounding, and queued work of another stream
        b, y = torch.randn_like(a), torch.empty_like(a)
        x, z, out = (borrow(urdir_gpu, each) for each in (a, b, y))
    with x, z, out, urdir_gpu.create_stream() as stream:
        launch(urdir_gpu.load(spec), pack(spec, {"a": x, "b": z, "y": out}), stream)
        stream.synchronize()
    assert torch.equal(y, a + b)
    expected = run_kernel(urdir_gpu, spec, {"a": a.cpu().numpy(), "b": b.cpu().numpy()})["y"]
    np.testing.assert_array_equal(y.cpu().numpy(), expected)
