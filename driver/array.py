"""Device memory shared with other libraries (torch, cupy) without a copy, in both directions.

DLPack (dmlc/dlpack, ``dlpack.h``) and version 3 of the CUDA array interface (numba's document).
Streams of urdir are blocking, so the legacy default stream is ordered with all of them: memory goes
out and comes in in the order of that stream. Contexts are the primary ones, as those of CUDA's
runtime are. The memory of an emulator is none that another library could read, and is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.context import OpenDevice
from urdir.driver.errors import TransferError, check
from urdir.driver.memory import Buffer, Region
from urdir.driver.stream import Event

#: DLDeviceType of CUDA memory.
CUDA = 2
#: CU_STREAM_LEGACY, the legacy default stream; the number is that of both protocols, too.
LEGACY = 1

#: Code of a DLDataType by numpy's kind. bf16, which numpy lacks, is given by this name.
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BF16 = "bf16"
_BF16_CODE = 4


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor: a tensor, and the function that ends its use."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_NAME, _USED = b"dltensor", b"used_dltensor"
_python = ctypes.pythonapi


def _prototype(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, _python))


_new_capsule = _prototype(
    "PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)
#: Of a capsule by its address: a capsule that is being destroyed must not be referenced again.
_is_valid = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer = _prototype("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_rename = _prototype("PyCapsule_SetName", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)

#: What consumers still use, by the address of its DLManagedTensor.
_exported: dict[int, tuple[Any, ...]] = {}


def _delete(address: int) -> None:
    *_, buffer = _exported.pop(address)
    buffer.release()


def _drop(capsule: int) -> None:
    """Destroy a capsule; an unconsumed one ends the use of its memory."""
    if _is_valid(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


_DELETE, _DROP = _Deleter(_delete), _Destructor(_drop)


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array at the start of a buffer or slice: ``torch.from_dlpack(array)``.

    ``dtype`` is numpy's, or "bf16", which DLPack alone has. `Buffer.close` is refused while a
    consumer of DLPack holds the memory; consumers of the array interface must keep the buffer open.
    Raises TransferError if the region is too small; export raises it for memory of an emulator.
    """

    region: Region
    dtype: npt.DTypeLike
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        needed = prod(self.shape) * self._itemsize
        if needed > self.region.nbytes:
            raise TransferError(
                f"array {self.dtype} {self.shape} in {self.region.name!r}: it needs {needed} "
                f"bytes, there are {self.region.nbytes}"
            )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        _check_real(self._device, f"export of {self.region.name!r}")
        if self.dtype == _BF16:
            raise TransferError("the CUDA array interface has no bf16: use from_dlpack")
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.region.address, False),
            "version": 3,
            "strides": None,
            "stream": LEGACY,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        _check_real(self._device, f"export of {self.region.name!r}")
        return CUDA, _ordinal(self._device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for a consumer, whose ``stream`` waits for all work queued so far.

        Raises BufferError for a copy, and for another device.
        """
        where = self.__dlpack_device__()
        if copy or (dl_device is not None and tuple(dl_device) != where):
            raise BufferError(f"{self.region.name!r} is shared on device {where}, not copied")
        if stream == 0:
            raise BufferError("stream 0 is ambiguous: 1 is the legacy default stream")
        if stream is not None and stream not in (-1, LEGACY):
            _wait(self._device, stream, LEGACY)
        return self._capsule(where)

    def _capsule(self, where: tuple[int, int]) -> Any:
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        kind = _Type(self._code, 8 * self._itemsize, 1)
        pointer = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        tensor = _Tensor(self.region.address, _Device(*where), len(shape), kind, pointer)
        managed = _Managed(tensor, None, ctypes.cast(_DELETE, ctypes.c_void_p))
        address, buffer = ctypes.addressof(managed), self.region.buffer
        buffer.hold()
        _exported[address] = managed, shape, buffer
        return _new_capsule(address, _NAME, ctypes.cast(_DROP, ctypes.c_void_p))

    @property
    def _device(self) -> OpenDevice:
        return self.region.buffer.device

    @property
    def _itemsize(self) -> int:
        return 2 if self.dtype == _BF16 else np.dtype(self.dtype).itemsize

    @property
    def _code(self) -> int:
        if self.dtype == _BF16:
            return _BF16_CODE
        kind = np.dtype(self.dtype).kind
        if kind not in _CODES:
            raise BufferError(f"DLPack has no type for {np.dtype(self.dtype)}")
        return _CODES[kind]


class BorrowedBuffer(Buffer):
    """The memory of another library's array, for launches and copies; see `borrow`."""

    kind = "borrowed buffer"

    def __init__(
        self, device: OpenDevice, address: int, nbytes: int, name: str, end: Callable[[], object]
    ) -> None:
        super(Buffer, self).__init__(device, name, address)
        self.nbytes, self.offset, self._end = nbytes, 0, end

    def _destroy(self, handle: Any) -> Any:
        # its owner may reuse the memory at once
        result = self.device.api.cuCtxSynchronize()
        self._end()
        return result


def borrow(device: OpenDevice, array: Any, name: str = "borrowed") -> BorrowedBuffer:
    """The memory of a C-contiguous array of torch, cupy or another library on ``device``.

    Launches that follow run after what the array's library has queued. The array lives until the
    buffer closes, which waits for the device. Raises TransferError for host memory, another device,
    other strides, an empty array and an emulator.
    """
    what = f"borrowing {name!r}"
    _check_real(device, what)
    if hasattr(array, "__dlpack__"):
        kind, number = (int(part) for part in array.__dlpack_device__())
        if (kind, number) != (CUDA, _ordinal(device)):
            raise TransferError(
                f"{what}: the array is on DLPack device {(kind, number)}, not on {device.name}: "
                "move it there, or upload() a numpy array"
            )
        return _of_capsule(device, array.__dlpack__(stream=LEGACY), name)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TransferError(
            f"{what}: {type(array).__name__} has neither __dlpack__ nor __cuda_array_interface__; "
            "upload() takes numpy arrays"
        )
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if interface.get("strides") is not None:
        strides = tuple(stride / dtype.itemsize for stride in interface["strides"])
        _check_contiguous(shape, strides, what)
    if (stream := interface.get("stream")) not in (None, LEGACY):
        _wait(device, LEGACY, stream)
    nbytes = _check_filled(prod(shape) * dtype.itemsize, what)
    keep = [array]
    return BorrowedBuffer(device, int(interface["data"][0]), nbytes, name, keep.clear)


def _of_capsule(device: OpenDevice, capsule: Any, name: str) -> BorrowedBuffer:
    """Consume a capsule: its deleter is called when the buffer closes."""
    what = f"borrowing {name!r}"
    if not _is_valid(id(capsule), _NAME):
        raise TransferError(f"{what}: not a DLPack capsule, or one that was used before")
    managed = _Managed.from_address(_pointer(id(capsule), _NAME))
    tensor = managed.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        _check_contiguous(shape, tuple(tensor.strides[: tensor.ndim]), what)
    bits = prod(shape) * tensor.dtype.bits * tensor.dtype.lanes
    nbytes = _check_filled(-(-bits // 8), what)
    _rename(id(capsule), _USED)
    address, deleter = ctypes.addressof(managed), managed.deleter

    def end() -> None:
        if deleter:
            _Deleter(deleter)(address)

    return BorrowedBuffer(device, tensor.data + tensor.byte_offset, nbytes, name, end)


def _check_contiguous(shape: tuple[int, ...], strides: tuple[float, ...], what: str) -> None:
    wanted = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != wanted:
            raise TransferError(f"{what}: shape {shape} is not C-contiguous; copy it first")
        wanted *= extent


def _check_filled(nbytes: int, what: str) -> int:
    if nbytes <= 0:
        raise TransferError(f"{what}: the array is empty")
    return nbytes


def _check_real(device: OpenDevice, what: str) -> None:
    """Refuse the memory of an emulator: it is neither the GPU's nor host memory by address."""
    if device.is_emulated:
        raise TransferError(
            f"{what}: the memory of {device.name} can be shared with no other library; "
            "use upload() and download()"
        )


def _ordinal(device: OpenDevice) -> int:
    return int(device.context.gpu)


def _wait(device: OpenDevice, later: int, earlier: int) -> None:
    """Let stream ``later`` wait for what ``earlier`` has queued; both are handles as numbers."""
    api = device.api
    device.context.make_current()
    with Event(device, "exchange") as event:
        result = api.cuEventRecord(event.handle, earlier)
        check(api, result, f"cuEventRecord on stream {earlier:#x}")
        result = api.cuStreamWaitEvent(later, event.handle, 0)
        check(api, result, f"cuStreamWaitEvent on stream {later:#x}")
