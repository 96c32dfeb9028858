"""Page-locked host memory."""

from __future__ import annotations

import ctypes
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.context import OpenDevice, Owned
from urdir.driver.errors import TransferError, check

Array = npt.NDArray[Any]

#: Bytes of pinned memory from which on it is mapped by the process; bytes that a thread touches at
#: once, and threads.
MAPPED_NBYTES, _TOUCHED_NBYTES, _TOUCHING = 32 << 20, 16 << 20, 8


class PinnedBuffer(Owned):
    """``nbytes`` bytes of page-locked host memory: copies to and from it are asynchronous and fast.

    Raises CudaError, OutOfMemoryError, TransferError for no bytes.

    Much of it is mapped in huge pages, which threads touch first, and then registered: 4 GB in 0.2
    s, where cuMemHostAlloc takes 1.9 (H200, a host of two sockets, 2026-11-28).
    """

    kind = "pinned buffer"

    def __init__(self, device: OpenDevice, nbytes: int, name: str) -> None:
        if not is_size(nbytes):
            raise TransferError(f"pinned buffer {name!r}: {nbytes!r} bytes cannot be allocated")
        device.context.make_current()
        api = device.api
        self._mapped = map_touched(nbytes) if nbytes >= MAPPED_NBYTES else None
        if self._mapped is None:
            what = f"cuMemHostAlloc {nbytes} bytes for {name!r}"
            address = int(check(api, api.cuMemHostAlloc(nbytes, 0), what))
        else:
            what = f"cuMemHostRegister {nbytes} bytes for {name!r}"
            address = self._mapped.ctypes.data
            check(api, api.cuMemHostRegister(address, nbytes, 0), what)
        super().__init__(device, name, address)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """The address, the same for host and device (unified addressing)."""
        return int(self.handle)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, (nbytes,) u8; a view that must not be used after `close`."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))

    def view(self, dtype: npt.DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> Array:
        """An array in place, of ``dtype`` and ``shape``, from byte ``offset`` on; TransferError if
        outside."""
        count = math.prod((shape,) if isinstance(shape, int) else shape)
        nbytes = count * np.dtype(dtype).itemsize
        self.span(offset, nbytes)
        return self.array[offset : offset + nbytes].view(dtype).reshape(shape)

    def span(self, offset: int, nbytes: int) -> int:
        """The address of ``nbytes`` bytes from ``offset`` on; TransferError if outside."""
        if offset < 0 or nbytes <= 0 or offset + nbytes > self.nbytes:
            raise TransferError(
                f"bytes [{offset}, {offset + nbytes}) are not in pinned buffer {self.name!r}, "
                f"which has {self.nbytes}"
            )
        return self.address + offset

    def _destroy(self, handle: Any) -> Any:
        api = self.device.api
        if self._mapped is None:
            return api.cuMemFreeHost(handle)
        waited = api.cuCtxSynchronize()  # copies may run, and the pages are unmapped next
        result = api.cuMemHostUnregister(handle)
        self._mapped = None
        return waited if int(waited[0]) else result


def is_size(nbytes: Any) -> bool:
    """Whether so large an allocation can be: a whole number above 0."""
    return isinstance(nbytes, Integral) and int(nbytes) > 0


def map_touched(nbytes: int) -> npt.NDArray[np.uint8] | None:
    """Memory of the process whose pages exist, in huge pages if possible; None where the system has
    no such mapping."""
    flag = getattr(mmap, "MADV_HUGEPAGE", None)
    if flag is None:
        return None
    try:
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(flag)
    except OSError:
        return None
    pages = np.frombuffer(area, np.uint8)
    parts = range(0, nbytes, _TOUCHED_NBYTES)
    with ThreadPoolExecutor(min(_TOUCHING, len(parts)), "touch") as threads:
        list(
            threads.map(lambda at: pages[at : at + _TOUCHED_NBYTES : mmap.PAGESIZE].fill(0), parts)
        )
    return pages
