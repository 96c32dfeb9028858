"""Expansion at load of TQ1_0, whose weights are digits to base 3: its blocks become those of TQ2_0.

Every weight keeps exactly its value in GGUF; it takes 2.0625 bits in place of 1.6875. Source:
ggml's blocks, as the ``gguf`` package's ``quants`` decodes them.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.weights.format import Format

Bytes = npt.NDArray[np.uint8]


def expand(fmt: Format, blocks: Bytes) -> Bytes:
    """Convert GGUF blocks (bytes of any shape) to those that ``fmt.planes`` describe, (bytes,) u8;
    types other than TQ1_0 are unchanged.
    """
    if not fmt.expanded:
        return blocks.reshape(-1)
    return _tq1_0(blocks.reshape(-1, fmt.nbytes)).reshape(-1)


@functools.cache
def _trits() -> Bytes:
    """The five digits to base 3 of each byte, which is a fraction of 256, (5, 256) u8."""
    powers = np.array([[1], [3], [9], [27], [81]], np.uint8)
    fractions = np.arange(256, dtype=np.uint8) * powers
    return (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def _tq1_0(blocks: Bytes) -> Bytes:
    """Weights 0 ... 159 are digits of 32 bytes, then 80 of 16 bytes and 16 of 4; TQ2_0 has weights
    32 apart in a byte.
    """
    digits = _trits()
    most, middle, last, d = np.hsplit(blocks, [32, 48, 52])
    first_half = _pack_trits(*digits[:4])[most]
    second_half = _pack_trits(
        digits[4][most],
        np.hstack([digit[middle] for digit in digits[:2]]),
        np.hstack([digit[middle] for digit in digits[2:4]]),
        np.hstack([digits[4][middle], *(digit[last] for digit in digits[:4])]),
    )
    return np.hstack([first_half, second_half, d])


def _pack_trits(a: Bytes, b: Bytes, c: Bytes, d: Bytes) -> Bytes:
    packed: Bytes = a | b << np.uint8(2) | c << np.uint8(4) | d << np.uint8(6)
    return packed
