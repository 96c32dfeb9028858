"""Device memory: buffers, their slices, arenas of named slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.context import Closing, OpenDevice, Owned
from urdir.driver.errors import OutOfMemoryError, TransferError, check, error_of
from urdir.driver.pinned import PinnedBuffer, is_size
from urdir.driver.stream import Stream

Array = npt.NDArray[Any]

#: Alignment of an arena's slices in bytes: what cuMemAlloc gives, more than any access needs.
ALIGNMENT = 256


class Region:
    """Bytes ``[offset, offset + nbytes)`` of a buffer, for copies, fills and launches.

    Either a whole `Buffer` or a `Slice`. Copies without a stream are ordered after all earlier work
    of the device's streams, and those to the host are complete when they return. Every method
    raises LifetimeError if the buffer is closed and TransferError if it would leave the region.
    """

    __slots__ = ()
    name: str
    nbytes: int
    offset: int

    @property
    def buffer(self) -> Buffer:
        """The allocation of the bytes."""
        raise NotImplementedError

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        return int(self.buffer.handle) + self.offset

    def slice(self, offset: int, nbytes: int, name: str | None = None) -> Slice:
        """``nbytes`` bytes from ``offset`` on; ``name`` defaults to this region's."""
        self._check_span(offset, nbytes, "slice")
        return Slice(self.buffer, self.offset + offset, nbytes, name or self.name)

    def upload(self, array: Array, offset: int = 0) -> None:
        """Copy a C-contiguous array of any shape to ``offset``."""
        host = _contiguous(array, f"upload to {self.name!r}")
        api, at = self._enter(offset, array.nbytes, "upload")
        what = f"cuMemcpyHtoD {array.nbytes} bytes to {self.name!r}"
        check(api, api.cuMemcpyHtoD(at, host, array.nbytes), what)

    def download(
        self, dtype: npt.DTypeLike, shape: int | tuple[int, ...] | None = None, offset: int = 0
    ) -> Array:
        """A new array of ``dtype`` and ``shape`` from ``offset`` on; by default the whole
        region."""
        dtype = np.dtype(dtype)
        if shape is None:
            shape, odd = divmod(self.nbytes - offset, dtype.itemsize)
            if odd or shape < 0:
                raise TransferError(
                    f"download from {self.name!r}: {self.nbytes} bytes from {offset} on are not a "
                    f"whole number of {dtype}"
                )
        array = np.empty(shape, dtype)
        api, at = self._enter(offset, array.nbytes, "download")
        what = f"cuMemcpyDtoH {array.nbytes} bytes from {self.name!r}"
        check(api, api.cuMemcpyDtoH(array.ctypes.data, at, array.nbytes), what)
        return array

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        """Set every byte to ``byte`` (0 to 255), in the order of ``stream`` if given."""
        if not 0 <= byte <= 255:
            raise TransferError(f"fill of {self.name!r}: {byte} is not a byte")
        api, at = self._enter(0, self.nbytes, "fill")
        what = f"cuMemsetD8 {self.nbytes} bytes of {self.name!r}"
        if stream is None:
            check(api, api.cuMemsetD8(at, byte, self.nbytes), what)
        else:
            check(api, api.cuMemsetD8Async(at, byte, self.nbytes, stream.handle), what)

    def upload_async(
        self,
        pinned: PinnedBuffer,
        nbytes: int,
        offset: int,
        stream: Stream,
        pinned_offset: int = 0,
    ) -> None:
        """Queue a copy of ``nbytes`` bytes from pinned memory to ``offset``.

        The pinned bytes must not change until the stream has passed this point (an event).
        """
        host = pinned.span(pinned_offset, nbytes)
        api, at = self._enter(offset, nbytes, "upload")
        what = f"cuMemcpyHtoDAsync {nbytes} bytes to {self.name!r}"
        check(api, api.cuMemcpyHtoDAsync(at, host, nbytes, stream.handle), what)

    def download_async(
        self,
        pinned: PinnedBuffer,
        nbytes: int,
        offset: int,
        stream: Stream,
        pinned_offset: int = 0,
    ) -> None:
        """Queue a copy of ``nbytes`` bytes from ``offset`` into pinned memory."""
        host = pinned.span(pinned_offset, nbytes)
        api, at = self._enter(offset, nbytes, "download")
        what = f"cuMemcpyDtoHAsync {nbytes} bytes from {self.name!r}"
        check(api, api.cuMemcpyDtoHAsync(host, at, nbytes, stream.handle), what)

    def copy_from(self, source: Region, stream: Stream | None = None) -> None:
        """Copy all of ``source`` (not overlapping) to the region's start.

        A source on another device of the same group is copied in the order of ``stream``, a stream
        of this region's device, or after all earlier work of both devices.
        """
        api, at = self._enter(0, source.nbytes, f"copy from {source.name!r}")
        if source.buffer.device is not self.buffer.device:
            self._copy_from_peer(source, at, stream)
            return
        what = f"cuMemcpyDtoD {source.nbytes} bytes from {source.name!r} to {self.name!r}"
        if stream is None:
            check(api, api.cuMemcpyDtoD(at, source.address, source.nbytes), what)
        else:
            result = api.cuMemcpyDtoDAsync(at, source.address, source.nbytes, stream.handle)
            check(api, result, what)

    def _copy_from_peer(self, source: Region, at: int, stream: Stream | None) -> None:
        here, there = (region.buffer.device.context for region in (self, source))
        if not here.reaches(there):
            raise TransferError(
                f"copy from {source.name!r} of {there.name} to {self.name!r} of {here.name}: the "
                "devices are not of one group"
            )
        api, places = here.api, (at, here.handle, source.address, there.handle, source.nbytes)
        what = f"cuMemcpyPeer {source.nbytes} bytes from {source.name!r} to {self.name!r}"
        if stream is None:
            check(api, api.cuMemcpyPeer(*places), what)
        else:
            check(api, api.cuMemcpyPeerAsync(*places, stream.handle), what)

    def _enter(self, offset: int, nbytes: int, what: str) -> tuple[Any, int]:
        """Check, make the context current; returns the api and the device address of ``offset``."""
        self._check_span(offset, nbytes, what)
        address = self.address + offset
        device = self.buffer.device
        device.context.make_current()
        return device.api, address

    def _check_span(self, offset: int, nbytes: int, what: str) -> None:
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise TransferError(
                f"{what}: bytes [{offset}, {offset + nbytes}) are not in {self.name!r}, which has "
                f"{self.nbytes}"
            )


class Buffer(Owned, Region):
    """One allocation of ``nbytes`` bytes of device memory, contents undefined.

    Raises OutOfMemoryError, which reports needed and free memory, TransferError for no bytes. While
    a recorded graph holds the buffer, `close` raises LifetimeError.
    """

    kind = "buffer"

    def __init__(self, device: OpenDevice, nbytes: int, name: str) -> None:
        if not is_size(nbytes):
            raise TransferError(f"buffer {name!r}: {nbytes!r} bytes cannot be allocated")
        super().__init__(device, name, _allocate(device, nbytes, name))
        self.nbytes = nbytes
        self.offset = 0

    @property
    def buffer(self) -> Buffer:
        """The buffer itself."""
        return self

    def _destroy(self, handle: Any) -> Any:
        return self.device.api.cuMemFree(handle)


class Slice(Region):
    """``nbytes`` bytes from byte ``offset`` of a buffer, valid while the buffer is open: see
    `Region`."""

    __slots__ = ("_buffer", "name", "nbytes", "offset")

    def __init__(self, buffer: Buffer, offset: int, nbytes: int, name: str) -> None:
        self._buffer = buffer
        self.offset = offset
        self.nbytes = nbytes
        self.name = name

    @property
    def buffer(self) -> Buffer:
        """The allocation of the bytes."""
        return self._buffer

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        return int(self._buffer.handle) + self.offset

    def __repr__(self) -> str:
        end = self.offset + self.nbytes
        return f"<Slice {self.name!r}, bytes [{self.offset}, {end}) of {self._buffer.name!r}>"


class Arena(Closing, Mapping[str, Slice]):
    """Named slices of one buffer, each aligned to `ALIGNMENT` (256) bytes: ``arena["x"]``.

    ``sizes`` are bytes by name; slices lie in that order. Raises OutOfMemoryError, and
    TransferError for a slice without bytes; an unknown name is a KeyError that lists them.
    """

    def __init__(self, device: OpenDevice, sizes: Mapping[str, int], name: str) -> None:
        offset = 0
        spans: dict[str, tuple[int, int]] = {}
        for key, nbytes in sizes.items():
            if nbytes <= 0:
                raise TransferError(f"arena {name!r}: slice {key!r} has {nbytes} bytes")
            spans[key] = (offset, nbytes)
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.buffer = Buffer(device, offset, name)
        self._slices = {key: self.buffer.slice(*span, key) for key, span in spans.items()}

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self.buffer.name

    @property
    def nbytes(self) -> int:
        """Total size in bytes, padding included."""
        return self.buffer.nbytes

    def __repr__(self) -> str:
        return f"<Arena {self.name!r}, {self.nbytes:,} bytes: {', '.join(self)}>"

    def close(self) -> None:
        """Free the buffer; see `Buffer.close`."""
        self.buffer.close()

    def __getitem__(self, key: str) -> Slice:
        try:
            return self._slices[key]
        except KeyError:
            names = ", ".join(self)
            raise KeyError(f"arena {self.name!r} has no slice {key!r}: {names}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)


def _allocate(device: OpenDevice, nbytes: int, name: str) -> int:
    device.context.make_current()
    api = device.api
    status, address = api.cuMemAlloc(nbytes)
    if not int(status):
        return int(address)
    error = error_of(api, status, f"cuMemAlloc {nbytes} bytes for {name!r}")
    if not isinstance(error, OutOfMemoryError):
        raise error
    free, total = device.memory_info()
    detail = f" (buffer {name!r} needs {nbytes:,} bytes, {free:,} of {total:,} are free)"
    raise OutOfMemoryError(
        error.name, error.code, error.call, detail, needed=nbytes, free=free, total=total
    )


def _contiguous(array: Array, what: str) -> int:
    """The host address of an array that can be copied without conversion."""
    if not isinstance(array, np.ndarray):
        raise TransferError(f"{what}: a numpy array is needed, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise TransferError(f"{what}: dtype {array.dtype} holds Python objects")
    if not array.flags.c_contiguous:
        raise TransferError(
            f"{what}: shape {array.shape} with strides {array.strides} is not C-contiguous; "
            "use numpy.ascontiguousarray"
        )
    return int(array.ctypes.data)
