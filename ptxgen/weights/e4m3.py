"""Floats of eight bits, OCP's E4M3, in numpy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

#: The largest number.
MOST = 448


@functools.cache
def e4m3() -> npt.NDArray[np.float32]:
    """The value of each byte, (256,) f32. Bytes that are NaN stand for 480, as they do to the
    kernels."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    whole = np.where(exponent, 8 + mantissa, mantissa).astype(np.float32)
    sizes = np.ldexp(whole, np.maximum(exponent, 1) - 10)
    values: npt.NDArray[np.float32] = np.where(byte < 128, sizes, -sizes)
    return values


def to_e4m3(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The byte nearest to each value from -448 to 448 (f32), ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    # three bits of mantissa, and an exponent that is 120 less
    normal = (size + np.uint32(0x7FFFF) + (size >> 20 & 1) >> 20) - np.uint32(120 << 3)
    small = np.rint(size.view(np.float32) * np.float32(512)).astype(np.uint32)
    found = np.where(size < np.uint32(121 << 23), small, normal)
    signed: npt.NDArray[np.uint8] = (found | bits >> 24 & 0x80).astype(np.uint8)
    return signed
