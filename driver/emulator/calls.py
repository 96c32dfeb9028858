"""Declaration of emulated functions: results, error codes, argument conversion.

An emulated ``cu*`` function is a plain function whose first parameter is the :class:`Driver` and
whose others are named and ordered as in ``cuda.bindings.driver``. It returns its value (a tuple for
several, None for none) or raises :class:`Refused`; `dispatch.bind` turns both into the result
tuples of the bindings. Arguments that the bindings themselves reject with a TypeError,
OverflowError or RuntimeError before the driver is reached are rejected likewise by the converters
below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

#: An empty buffer has an address too.
_NOTHING = np.zeros(1, np.uint8)


class Refused(Exception):  # noqa: N818
    """The driver returns an error: ``code`` is the name of a CUresult."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.code = code
        self.message = message


class Needs(Enum):
    """Preconditions of a function."""

    NOTHING = 0
    INIT = 1
    #: A current, live and healthy context; otherwise the context's own error is returned.
    CONTEXT = 2


def driver_call(
    results: int = 0, needs: Needs = Needs.CONTEXT, defers: bool = False
) -> Callable[[Any], Any]:
    """Declare an emulated function with ``results`` values after the status.

    ``defers``: it runs queued work and then destroys something. A finaliser may make such a call in
    the middle of another call of the same thread; it is deferred until that one ends.
    """

    def declare(function: Any) -> Any:
        function.results = results
        function.needs = needs
        function.defers = defers
        return function

    return declare


def _integer(value: Any, bits: int, c_name: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise TypeError("an integer is required") from None
    if isinstance(value, str | bytes):
        raise TypeError("an integer is required")
    if number < 0:
        raise OverflowError(f"can't convert negative value to {c_name}")
    if number >> bits:
        raise OverflowError(f"value too large to convert to {c_name}")
    return number


def uint(value: Any) -> int:
    """An ``unsigned int``; silently truncates a float, as Cython does."""
    return _integer(value, 32, "unsigned int")


def size_t(value: Any) -> int:
    """A ``size_t``."""
    return _integer(value, 64, "size_t")


def uchar(value: Any) -> int:
    """An ``unsigned char``."""
    return _integer(value, 8, "unsigned char")


def ushort(value: Any) -> int:
    """An ``unsigned short``."""
    return _integer(value, 16, "unsigned short")


def handle(value: Any) -> int:
    """The number of an opaque handle or device pointer; None is 0."""
    return 0 if value is None else _integer(value, 64, "void_ptr")


def c_string(value: Any) -> bytes:
    """A ``char*``: bytes up to the first NUL."""
    if not isinstance(value, bytes | bytearray):
        raise TypeError(f"expected bytes, {type(value).__name__} found")
    return bytes(value).split(b"\0", 1)[0]


def host_address(value: Any) -> int:
    """Address of host memory: an int, None (0), or an object with the buffer protocol.

    The bindings accept read-only buffers as destinations too; so does this. They convert an array
    of one element to an int and use its value as the address: here that is a TypeError.
    """
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        if value.size == 1 or not (value.flags.c_contiguous or value.flags.f_contiguous):
            raise TypeError("pass array.ctypes.data: the array is not a contiguous buffer")
        return int(value.ctypes.data)
    try:
        return int(value) if not isinstance(value, str) else _not_memory(value)
    except (TypeError, ValueError):
        return _buffer_address(value)


def kernel_params(value: Any) -> int:
    """The address of a pointer array (``kernelParams``): an int, a buffer, or None.

    The bindings' other form, a tuple of values and a tuple of ctypes types, is refused.
    """
    if isinstance(value, int) or value is None:
        return value or 0
    if isinstance(value, tuple | list | float | str):
        raise TypeError("Argument 'kernelParams' is not the address of a pointer array")
    return _buffer_address(value)


def _buffer_address(value: Any) -> int:
    try:
        size = memoryview(value).nbytes
    except TypeError:
        return _not_memory(value)
    return int((np.frombuffer(value, np.uint8) if size else _NOTHING).ctypes.data)


def _not_memory(value: Any) -> int:
    raise TypeError(
        f"Provided argument is of type {type(value)} but expected Type {type(None)}, {type(int)} "
        "or object with Buffer Protocol"
    )


def expect(name: str, values: Any, kind: type, count: int | None = None) -> list[Any]:
    """A list argument whose items are all of one bindings type, at least ``count`` of them."""
    items: Sequence[Any] = [] if values is None else values
    if not isinstance(items, list | tuple) or not all(isinstance(i, kind) for i in items):
        raise TypeError(
            f"Argument '{name}' is not instance of type (expected tuple[{kind.__name__}] or "
            f"list[{kind.__name__}]"
        )
    if count is None:
        return list(items)
    # An empty or absent list is passed on as NULL; the driver decides.
    if values is not None and count > len(items):
        raise RuntimeError(f"List is too small: {len(items)} < {count}")
    return list(items[:count])


def expect_enum(name: str, value: Any, kind: Any) -> Any:
    """An enum argument: a member, or (as the bindings accept for most) its number."""
    try:
        return kind(int(value))
    except (TypeError, ValueError):
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{name} is not a {kind.__name__}") from None


def option(read: Callable[[], Any], default: Any) -> Any:
    """A struct field whose unset value 0 is not a member of its enum (reading it raises)."""
    try:
        return read()
    except ValueError:
        return default
