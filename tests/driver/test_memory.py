"""Buffers, slices, arenas, pinned memory: bytes, bounds and lifetimes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LifetimeError, OutOfMemoryError, TransferError
from urdir.driver.memory import ALIGNMENT

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("dtype", ["u1", "<f2", "<f4", "<i8", "<f8"])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 257), ()])
def test_upload_then_download(device: Device, dtype: str, shape: tuple[int, ...]) -> None:
    array = RNG.integers(0, 100, shape).astype(dtype)
    with device.allocate(array.nbytes, "x") as buffer:
        buffer.upload(array)
        back = buffer.download(dtype, shape)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_offsets_and_slices_address_the_same_bytes(device: Device) -> None:
    buffer = device.allocate(1024, "x")
    buffer.fill(0)
    array = RNG.standard_normal(9).astype(np.float32)
    part = buffer.slice(256, 512, "part")
    inner = part.slice(64, 128)
    part.upload(array, offset=68)
    assert (part.name, inner.name) == ("part", "part")
    assert (inner.address, inner.offset, inner.nbytes) == (buffer.address + 320, 320, 128)
    assert inner.buffer is buffer
    assert np.array_equal(inner.download("f4", 9, offset=4), array)
    assert np.array_equal(buffer.download("f4", 9, offset=324), array)
    expected = np.zeros(1024, np.uint8)
    expected[324 : 324 + 36] = array.view(np.uint8)
    assert np.array_equal(buffer.download("u1"), expected)


def test_fill_and_copy(device: Device) -> None:
    a, b = device.allocate(1000, "a"), device.allocate(1000, "b")
    a.fill(0xAB)
    b.fill(1)
    b.slice(100, 50).fill(2)
    a.slice(500, 200).copy_from(b.slice(50, 200))
    expected = np.full(1000, 0xAB, np.uint8)
    expected[500:700] = 1
    expected[550:600] = 2
    assert np.array_equal(a.download("u1"), expected)


def test_asynchronous_copies_run_in_stream_order(device: Device) -> None:
    data = RNG.integers(0, 256, 5000).astype(np.uint8)
    buffer = device.allocate(8000, "x")
    with device.create_stream() as stream, device.pinned(20000, "staging") as pinned:
        pinned.array[100:5100] = data
        buffer.fill(0, stream)
        buffer.upload_async(pinned, 5000, 1000, stream, pinned_offset=100)
        buffer.slice(6000, 2000).copy_from(buffer.slice(1000, 2000), stream)
        buffer.download_async(pinned, 8000, 0, stream, pinned_offset=8000)
        stream.synchronize()
        expected = np.zeros(8000, np.uint8)
        expected[1000:6000] = data
        expected[6000:8000] = data[:2000]
        assert np.array_equal(pinned.array[8000:16000], expected)
        assert pinned.view("<u4", (2, 500), offset=8000).shape == (2, 500)
        assert pinned.view("u1", 3, offset=9000).tolist() == data[:3].tolist()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 4), (0, 17), (16, 1), (13, 4), (0, 0), (0, -1), (2**63, 4)]
)
def test_slices_are_bounds_checked(device: Device, offset: int, nbytes: int) -> None:
    buffer = device.allocate(16, "x")
    with pytest.raises(TransferError, match=r"slice: bytes .* are not in 'x', which has 16"):
        buffer.slice(offset, nbytes)


def test_transfers_are_checked(device: Device) -> None:
    buffer = device.allocate(16, "x")
    grid = np.zeros((4, 4), np.float32)
    refused: list[tuple[Any, str]] = [
        (lambda: buffer.upload(grid), r"bytes \[0, 64\) are not in 'x'"),
        (lambda: buffer.upload(grid[0], offset=4), r"bytes \[4, 20\) are not in 'x'"),
        (lambda: buffer.upload(grid[:, 0]), "not C-contiguous"),
        (lambda: buffer.upload([1, 2]), "a numpy array is needed, not list"),  # type: ignore[arg-type]
        (lambda: buffer.upload(np.array([None])), "holds Python objects"),
        (lambda: buffer.download("f4", 5), r"bytes \[0, 20\) are not in 'x'"),
        (lambda: buffer.download("f4", offset=2), "not a whole number of float32"),
        (lambda: buffer.fill(256), "256 is not a byte"),
        (lambda: buffer.copy_from(device.allocate(17, "y")), "copy from 'y'"),
    ]
    for call, message in refused:
        with pytest.raises(TransferError, match=message):
            call()


@pytest.mark.parametrize("nbytes", [0, -5])
def test_empty_allocations_are_refused(device: Device, nbytes: int) -> None:
    for allocate in (device.allocate, device.pinned):
        for odd in (nbytes, float(nbytes) + 7.5, str(nbytes), None):
            with pytest.raises(TransferError, match=f"'nothing': {odd!r} bytes"):
                allocate(odd, "nothing")  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="slice 'a'"):
        device.arena({"a": nbytes}, "arena")


def test_closed_buffer_is_named(device: Device) -> None:
    with device.allocate(16, "weights") as buffer:
        part = buffer.slice(0, 8, "part")
    buffer.close()
    assert buffer.closed
    for call in (lambda: buffer.download("u1"), lambda: part.fill(0), lambda: part.address):
        with pytest.raises(LifetimeError, match="buffer 'weights' was used after it was closed"):
            call()


def test_held_buffer_cannot_be_freed(device: Device) -> None:
    buffer = device.allocate(16, "x")
    buffer.hold()
    buffer.hold()
    with pytest.raises(LifetimeError, match=r"'x' is held by 2 recorded graph\(s\)"):
        buffer.close()
    buffer.release()
    buffer.release()
    buffer.close()
    with pytest.raises(LifetimeError, match="released more often"):
        buffer.release()
    with pytest.raises(LifetimeError, match="used after it was closed"):
        buffer.hold()


def test_out_of_memory_says_needed_and_free(device: Device) -> None:
    _, total = device.memory_info()
    with pytest.raises(OutOfMemoryError) as caught:
        device.allocate(total * 2, "too big")
    error = caught.value
    assert error.name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert not error.sticky
    assert (error.needed, error.total) == (total * 2, total)
    assert 0 < error.free <= total
    assert f"'too big' needs {total * 2:,} bytes, {error.free:,} of {total:,} are free" in str(
        error
    )
    device.allocate(16, "small").close()


def test_injected_allocation_failure(emulator: Device) -> None:
    emulator.api.inject("allocation", 2)
    with emulator.allocate(16, "first"):
        with pytest.raises(OutOfMemoryError, match="'second' needs 16 bytes"):
            emulator.allocate(16, "second")
        emulator.allocate(16, "third").close()


@pytest.mark.slow
def test_memory_comes_back(emulator: Device) -> None:
    before = emulator.memory_info()
    with emulator.allocate(1 << 20, "x"):
        assert emulator.memory_info()[0] <= before[0] - (1 << 20)
    assert emulator.memory_info() == before
    dropped = emulator.allocate(1 << 20, "x")
    del dropped
    gc.collect()
    assert emulator.memory_info() == before


def test_arena_slices_are_named_aligned_and_apart(device: Device) -> None:
    sizes = {"x": 1, "y": 256, "z": 257, "scores": 1000}
    with device.arena(sizes, "workspace") as arena:
        assert list(arena) == list(sizes)
        assert {name: part.nbytes for name, part in arena.items()} == sizes
        assert all(part.address % ALIGNMENT == 0 for part in arena.values())
        spans = [(part.offset, part.offset + part.nbytes) for part in arena.values()]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert arena.nbytes == arena.buffer.nbytes == 256 + 256 + 512 + 1024
        assert repr(arena) == "<Arena 'workspace', 2,048 bytes: x, y, z, scores>"
        for value, part in enumerate(arena.values()):
            part.fill(value)
        for value, part in enumerate(arena.values()):
            assert set(part.download("u1").tolist()) == {value}
        with pytest.raises(KeyError):
            _ = arena["w"]
    arena.close()
    with pytest.raises(LifetimeError, match="'workspace'"):
        arena["x"].fill(0)


def test_pinned_memory_ends_with_its_context_manager(device: Device) -> None:
    with device.pinned(64, "staging") as pinned:
        pinned.array[:] = 5
        assert int(pinned.array.sum()) == 320
        with pytest.raises(TransferError, match=r"bytes \[60, 68\) are not in pinned buffer"):
            pinned.view("f8", 1, offset=60)
    pinned.close()
    with pytest.raises(LifetimeError, match="pinned buffer 'staging'"):
        _ = pinned.array


def test_failed_close_of_a_healthy_context_is_an_error(emulator: Device) -> None:
    buffer = emulator.allocate(16, "x")
    assert int(emulator.api.cuMemFree(buffer.address)[0]) == 0  # behind the buffer's back
    with pytest.raises(CudaError, match="closing buffer 'x'"):
        buffer.close()
    buffer.close()
