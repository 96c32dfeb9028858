"""Weights of types that GGUF lacks, from their blocks: written apart from the package."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import numpy.typing as npt

from urdir.ptxgen.weights.formats import Bytes, Format

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

#: bitsandbytes' tables as integers: NF4's values times 31908, FP4's times 192.
CODES = {
    "NF4": [-31908, -22214, -16754, -12601, -9076, -5896, -2905, 0,
            2539, 5135, 7853, 10782, 14062, 17952, 23068, 31908],
    "FP4": [0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48],
}  # fmt: skip


def is_own(fmt: Format) -> bool:
    """Whether GGUF lacks the type."""
    return re.fullmatch(r"(W\d|E\dM\d|[NF][FP]4)[GR]\d+", fmt.name) is not None


def dequantized(fmt: Format, blocks: Bytes) -> npt.NDArray[np.float32]:
    """Blocks (count, bytes) -> weights (count, block) f32."""
    kind, size = re.split("[GR]", fmt.name)
    if kind == "E4M3":
        scale = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
        return scale * blocks[:, 4:].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if kind == "E2M1":
        scale = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
        factors = blocks[:, 4 : 4 + int(size) // 16] & 0x7F
        factors = factors.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values = 2 * E2M1[_digits(blocks[:, 4 + int(size) // 16 :], 4)]
        each = values.reshape(len(blocks), -1, 16) * (scale * factors)[..., None]
        return each.reshape(len(blocks), -1)
    if kind in CODES:
        scale = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
        codes = _digits(blocks[:, 4:], 4)
        return scale * np.array(CODES[kind], np.float32)[codes]
    bits = int(kind[1:])
    factors = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    zero = blocks[:, 4:5] & (255 if bits == 8 or size == "32" else 15)
    if bits == 3:
        low = int(size) // 4
        quants = _digits(blocks[:, 5 : 5 + low], 2) + 4 * _digits(blocks[:, 5 + low :], 1)
    else:
        quants = _digits(blocks[:, 5:], bits)
    return factors[:, :1] * quants.astype(np.float32) - factors[:, 1:] * zero.astype(np.float32)


def _digits(packed: Bytes, bits: int) -> Bytes:
    digits = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    values: Bytes = (digits << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
    return values
