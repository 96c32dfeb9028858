"""Copies and fills as byte operations: boxes of rows in host or device memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.calls import Refused, option
from urdir.driver.emulator.machine.memory import Memory

Bytes = npt.NDArray[np.uint8]
Interval = tuple[int, int]

_HOST = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
_DEVICE = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
_UNIFIED = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED


@dataclass(frozen=True, slots=True)
class Box:
    """``depth`` planes of ``height`` rows of ``width`` bytes; rows start ``pitch`` bytes apart,
    planes ``plane`` bytes. A single run of bytes has height and depth 1.
    """

    address: int
    width: int
    is_device: bool
    height: int = 1
    depth: int = 1
    pitch: int = 0
    plane: int = 0

    @property
    def span(self) -> int:
        """Bytes from the first to the last, gaps included."""
        return (self.depth - 1) * self.plane + (self.height - 1) * self.pitch + self.width

    def rows(self, memory: Memory) -> Bytes:
        """The bytes in place, (depth, height, width)."""
        if self.is_device:
            return self._strided(memory.view(self.address, self.span))
        host = (ctypes.c_uint8 * self.span).from_address(self.address)
        return self._strided(np.ctypeslib.as_array(host))

    def put(self, memory: Memory, rows: Bytes) -> None:
        """Write (depth, height, width) bytes and mark them as written."""
        if self.is_device and self.height * self.depth == 1:
            memory.write(self.address, rows)
            return
        self.rows(memory)[...] = rows
        if self.is_device and (found := memory.find(self.address)) and not found.is_written:
            offset = self.address - found.address
            self._strided(found.shadows[0][offset : offset + self.span])[...] = 0xFF

    def intervals(self) -> list[Interval]:
        """The device bytes of the box as (start, stop) addresses; none for host memory."""
        if not self.is_device:
            return []
        starts = (
            self.address + z * self.plane + y * self.pitch
            for z in range(self.depth)
            for y in range(self.height)
        )
        return [(start, start + self.width) for start in starts]

    def check(self, memory: Memory) -> None:
        """Refuse device bytes outside an allocation, and a null host address."""
        if self.is_device and not memory.contains(self.address, self.span):
            where = f"[{self.address:#x}, {self.address + self.span:#x})"
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"{where} is not inside one allocation")
        if not self.is_device and not self.address:
            raise Refused("CUDA_ERROR_INVALID_VALUE", "a null host address")

    def _strided(self, flat: Bytes) -> Bytes:
        shape, strides = (self.depth, self.height, self.width), (self.plane, self.pitch, 1)
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between two boxes of equal extent. ``keep`` are host objects that must stay alive."""

    target: Box
    source: Box
    keep: tuple[Any, ...] = ()

    def check(self, memory: Memory) -> None:
        """Refuse as the driver does when the copy is queued."""
        self.target.check(memory)
        self.source.check(memory)

    def run(self, memory: Memory) -> None:
        """Copy; never-written bytes stay so if both sides are device memory."""
        if self.target.is_device and self.source.is_device:
            for (to, end), (start, _) in zip(self.writes(), self.reads(), strict=True):
                memory.copy(to, start, end - to)
        else:
            self.target.put(memory, self.source.rows(memory))

    def staged(self, memory: Memory) -> Staged:
        """The copy with its source already read."""
        return Staged(self.target, self.source.rows(memory).copy())

    def reads(self) -> list[Interval]:
        """Device bytes read."""
        return self.source.intervals()

    def writes(self) -> list[Interval]:
        """Device bytes written."""
        return self.target.intervals()


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A copy of ``nbytes`` bytes between the memories of two devices, with or without peer
    access."""

    target: Memory
    to: int
    source: Memory
    start: int
    nbytes: int

    def check(self) -> None:
        """Refuse what the driver refuses when the copy is queued."""
        for memory, address in ((self.target, self.to), (self.source, self.start)):
            if not memory.contains(address, self.nbytes):
                where = f"[{address:#x}, {address + self.nbytes:#x})"
                raise Refused("CUDA_ERROR_INVALID_VALUE", f"{where} is not of that context")

    def run(self) -> None:
        """Copy; bytes that were never written stay so."""
        self.target.copy(self.to, self.start, self.nbytes, self.source)


@dataclass(frozen=True, slots=True)
class Staged:
    """The second half of a copy from pageable memory, whose bytes were read at the call."""

    target: Box
    data: Bytes

    def run(self, memory: Memory) -> None:
        """Write the bytes."""
        self.target.put(memory, self.data)


@dataclass(frozen=True, slots=True)
class Fill:
    """Every element of ``size`` (1, 2, 4) bytes of a device box becomes ``value``."""

    target: Box
    value: int
    size: int

    def check(self, memory: Memory) -> None:
        """Refuse what the driver refuses when the fill is queued."""
        box = self.target
        if box.address % self.size or (box.height > 1 and box.pitch % self.size):
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"not aligned to {self.size} bytes")
        self.target.check(memory)

    def run(self, memory: Memory) -> None:
        """Fill."""
        for start, end in self.target.intervals():
            memory.fill(start, self.value, (end - start) // self.size, self.size)

    def reads(self) -> list[Interval]:
        """Nothing."""
        return []

    def writes(self) -> list[Interval]:
        """Device bytes written."""
        return self.target.intervals()


def copy_2d(memory: Memory, p: Any) -> Copy | None:
    """The copy that a CUDA_MEMCPY2D describes; None when it is empty."""
    return _copy(memory, p, p.WidthInBytes, p.Height, 1)


def copy_3d(memory: Memory, p: Any) -> Copy | None:
    """The copy that a CUDA_MEMCPY3D describes; None when it is empty."""
    return _copy(memory, p, p.WidthInBytes, p.Height, p.Depth)


def _copy(memory: Memory, p: Any, width: int, height: int, depth: int) -> Copy | None:
    if not width or not height or not depth:
        return None
    target = _box(memory, p, "dst", width, height, depth)
    return Copy(target, _box(memory, p, "src", width, height, depth))


def _box(memory: Memory, p: Any, side: str, width: int, height: int, depth: int) -> Box:
    """One side of a CUDA_MEMCPY2D or 3D; pitch and height may be 0 only where they do nothing."""
    kind = option(lambda: getattr(p, f"{side}MemoryType"), None)
    device, host = int(getattr(p, f"{side}Device")), int(getattr(p, f"{side}Host"))
    if kind not in (_HOST, _DEVICE, _UNIFIED):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{side}MemoryType {kind} is not supported")
    # A unified address identifies its memory type.
    is_device = kind == _DEVICE or (kind == _UNIFIED and memory.contains(device, 1))
    x, y = getattr(p, f"{side}XInBytes"), getattr(p, f"{side}Y")
    pitch, rows = getattr(p, f"{side}Pitch"), getattr(p, f"{side}Height", 0)
    if pitch < x + width and (pitch or y or height * depth > 1):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{side}Pitch {pitch} is less than a row")
    if rows < y + height and (rows or depth > 1):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{side}Height {rows} is less than a plane")
    start = (host if kind == _HOST else device) + y * pitch + x
    start += getattr(p, f"{side}Z", 0) * rows * pitch
    return Box(start, width, is_device, height, depth, pitch, rows * pitch)
