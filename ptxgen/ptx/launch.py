"""What a launch of a kernel takes: its parameters and its extent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from urdir.ptxgen.ptx.types import TYPE_BYTES

Dim3 = tuple[int, int, int]

# PTX element type -> numpy dtype. bf16 has no numpy type: its bits are stored as uint16.
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


class Access(Enum):
    """How a kernel uses the memory that a pointer parameter points to: it only reads it, writes
    all that its reference returns, or reads and writes it."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter: a pointer into global memory, or (``access=None``) a scalar.

    ``dtype`` is a PTX type: "f32", "u8", ...; an array of bf16 is uint16 in numpy, its bits.
    ``shape`` holds numbers or names of attributes of the spec ("rows", "cols"); a scalar has none.
    Raises ValueError for another type, shape or access.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...] = ()
    access: Access | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what is wrong: the class body of a spec fails, with its line."""
        if not isinstance(self.shape, tuple):
            raise ValueError(f"parameter {self.name}: shape is {self.shape!r}, not a tuple")
        if not isinstance(self.access, Access | None):
            raise ValueError(f"parameter {self.name}: access is {self.access!r}, not an Access")
        known = TYPE_BYTES if self.access is None else NUMPY_DTYPES
        if self.dtype not in known:
            raise ValueError(
                f"parameter {self.name}: {self.dtype!r} is not one of {', '.join(known)}"
            )

    @staticmethod
    def given(*params: object) -> tuple[Param, ...]:
        """The parameters among them. The others are false: of ``self.biased and Param(...)``."""
        return tuple(param for param in params if isinstance(param, Param))

    @property
    def is_pointer(self) -> bool:
        """True for an address in global memory, False for a scalar passed by value."""
        return self.access is not None

    @property
    def passes(self) -> int:
        """Transfers of the array by a launch: 2 if it is read and written, 0 of a scalar."""
        return 2 if self.access is Access.INOUT else int(self.is_pointer)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy type of one element (bf16 as its bits, uint16)."""
        return NUMPY_DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Grid, block and cluster in CTAs / threads (x, y, z); dynamic shared memory in bytes.

    ``cooperative``: all CTAs must be resident at once, for grid barriers. ``resident``: minimum
    resident CTAs per SM by registers; 0 leaves that to the assembler. ``prefers_shared``: as much
    as possible of an SM's memory is shared memory, not L1 cache. Kernels with different partitions
    never run on an SM together: one cannot start while the other ends.

    Raises ValueError for an extent of other than three numbers; limits of a device are checked
    when a kernel is loaded (LaunchError).
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    shared_bytes: int = 0
    cooperative: bool = False
    resident: int = 0
    prefers_shared: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an extent of other than three numbers."""
        for name, extent in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if type(extent) is not tuple or len(extent) != 3:
                raise ValueError(f"{name} is {extent!r}: expected three numbers, (x, y, z)")

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return self.block[0] * self.block[1] * self.block[2]
