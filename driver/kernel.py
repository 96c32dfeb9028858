"""Interface of a kernel for the driver: a small Protocol that kernel specs satisfy."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from urdir.driver.errors import LaunchError
from urdir.ptxgen.ptx.launch import LaunchShape, Param
from urdir.ptxgen.ptx.types import TYPE_BYTES

POINTER_BYTES = 8

#: PTX scalar type -> struct format, which also checks type and range (native formats turn large
#: floats into infinity, those after "<" do not). bf16 is passed as its bits.
SCALAR_FORMATS: Mapping[str, str] = {
    **{"u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"s8": "b", "s16": "h", "s32": "i", "s64": "q"},
    **{"b8": "B", "b16": "H", "b32": "I", "b64": "Q"},
    **{"f16": "e", "f32": "f", "f64": "d", "bf16": "H"},
}


class Tolerance(Protocol):
    """Allowed deviation from the reference: ``|x - ref| <= atol + rtol * max|ref|``."""

    @property
    def rtol(self) -> float:
        """Relative to the largest magnitude of the reference array."""

    @property
    def atol(self) -> float:
        """Absolute."""


@dataclass(frozen=True, slots=True)
class _Exact:
    rtol: float = 0.0
    atol: float = 0.0


#: Bit for bit.
EXACT: Tolerance = _Exact()


class Kernel(Protocol):
    """A specialised kernel: PTX for a target, parameters, launch shape."""

    @property
    def name(self) -> str:
        """The PTX entry name."""

    @property
    def params(self) -> Sequence[Param]:
        """The parameter list in PTX order."""

    @property
    def launch_shape(self) -> LaunchShape:
        """Grid, block, cluster and dynamic shared memory of every launch."""

    @property
    def waits_for_dependencies(self) -> bool:
        """Whether it runs ``griddepcontrol.wait``, so that a programmatic graph edge may lead to
        it."""

    def key(self, device: str, /) -> str:
        """The spec key on a device with that native target ("sm_90a"): known without rendering,
        equal in all processes."""

    def ptx(self, device: str, /) -> str:
        """The PTX text for a device of that native target."""

    def shape_of(self, param: Any) -> tuple[int, ...]:
        """The shape of the array that a pointer parameter points to."""

    def nbytes(self, param: Any) -> int:
        """The size in bytes of the array that a pointer parameter points to."""

    def reference(self, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The kernel in numpy: inputs and scalars by name in, outputs by name out."""

    @property
    def tolerance(self) -> Tolerance:
        """Allowed deviation of the outputs from the reference; 0, 0 for bit for bit."""

    def bytes_moved(self) -> int:
        """Minimum number of bytes that a launch reads and writes."""

    def flops(self) -> int:
        """Arithmetic operations of one launch."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Properties shared by all launches of a kernel, computed once (`signature`).

    ``layout`` and ``nbytes`` follow ``params``: place and size in the parameter block, and bytes
    that a pointer points to (None for a scalar). ``block`` packs the values of all into that block.
    ``pointers`` has the name, bytes and access ("in", "out" or "inout") of each pointer, ``sizes``
    the bytes by name. ``waits``: `Kernel.waits_for_dependencies`.
    """

    params: tuple[Param, ...]
    layout: tuple[tuple[int, int], ...]
    nbytes: tuple[int | None, ...]
    block: struct.Struct
    names: frozenset[str]
    pointers: tuple[tuple[str, int, str], ...]
    sizes: Mapping[str, int]
    shape: LaunchShape
    waits: bool


def signature(kernel: Kernel) -> Signature:
    """The signature of a kernel, cached for recent kernels. Raises LaunchError for what is none."""
    known = _SIGNATURES.get(id(kernel))
    if known is None:
        if len(_SIGNATURES) >= _MOST_SIGNATURES:
            _SIGNATURES.clear()
        known = _SIGNATURES[id(kernel)] = kernel, _signature(kernel)
    return known[1]


def nbytes_of(kernel: Kernel, name: str) -> int:
    """Bytes of the array that the pointer called ``name`` points to."""
    return signature(kernel).sizes[name]


#: By the identity of kernels, which need not be hashable and live as long as their entry.
_SIGNATURES: dict[int, tuple[Kernel, Signature]] = {}
_MOST_SIGNATURES = 4096


def _signature(kernel: Kernel) -> Signature:
    if isinstance(kernel, type):
        name = kernel.__name__
        raise LaunchError(f"{name} is a class of kernels: launch one of them, {name}(...)")
    if not hasattr(kernel, "launch_shape"):
        raise LaunchError(f"{kernel!r:.80} is not a kernel")
    params = tuple(kernel.params)
    layout = param_layout(kernel)
    pointers = tuple((p.name, kernel.nbytes(p), access_of(p)) for p in params if p.is_pointer)
    sizes = {name: nbytes for name, nbytes, _ in pointers}
    return Signature(
        params,
        layout,
        tuple(sizes.get(p.name) for p in params),
        _block(params, layout),
        frozenset(p.name for p in params),
        pointers,
        sizes,
        kernel.launch_shape,
        kernel.waits_for_dependencies,
    )


def access_of(param: Param) -> str:
    """The access of a pointer parameter, "in", "out" or "inout"; "" of a scalar."""
    return "" if param.access is None else str(param.access.value)


def _block(params: Sequence[Param], layout: Sequence[tuple[int, int]]) -> struct.Struct:
    parts, end = ["<"], 0
    for param, (offset, size) in zip(params, layout, strict=True):
        kind = "Q" if param.is_pointer else SCALAR_FORMATS[param.dtype]
        parts.append(f"{offset - end}x{kind}")
        end = offset + size
    return struct.Struct("".join(parts))


def param_layout(kernel: Kernel) -> tuple[tuple[int, int], ...]:
    """(offset, size) in bytes of every parameter in the parameter block.

    Each is aligned to its own size, as ptxas lays ``.param`` space out (PTX ISA 5.1.6).
    """
    layout = []
    end = 0
    for param in kernel.params:
        size = POINTER_BYTES if param.is_pointer else TYPE_BYTES[param.dtype]
        offset = -(-end // size) * size
        layout.append((offset, size))
        end = offset + size
    return tuple(layout)
