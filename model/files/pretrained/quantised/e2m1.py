"""Floats of four bits: NVFP4 of modelopt and compressed-tensors, MXFP4 of gpt-oss."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.files.pretrained.quantised.blocks import (
    Bytes,
    e2m1_blocks,
    e2m1_type,
    mxfp4_blocks,
)
from urdir.model.files.pretrained.quantised.parts import Parts, floats, rows_of
from urdir.model.files.safetensors import StoredTensor
from urdir.ptxgen.weights.formats import FORMATS


def nvfp4(parts: Parts, codes_end: str, scale_end: str) -> StoredTensor:
    """Codes (..., rows, cols / 2), N_scale (..., rows, cols / 16) E4M3, and a scale of each matrix,
    by which compressed-tensors divides and modelopt multiplies."""
    codes = parts.take(codes_end, ("U8",))
    if len(codes.shape) < 2:
        raise parts.refuse(f"is NVFP4 and has {len(codes.shape)} dimensions")
    *outer, rows, half = codes.shape
    fmt = e2m1_type(2 * half)
    if fmt is None:
        raise parts.refuse(f"is NVFP4 and has {2 * half} columns, expected a multiple of 64")
    factors = parts.take("scale", ("F8_E4M3",), (*outer, rows, half // 8))
    found = floats(parts.take(scale_end, ("F32",), (), (1,), tuple(outer), (*outer, 1)))
    scales = 1 / found.reshape(-1) if scale_end == "global_scale" else found.reshape(-1)
    scales = np.broadcast_to(scales.astype(np.float32), (math.prod(outer),))

    def make(first: int, last: int) -> Bytes:
        scale = scales[np.arange(first, last) // rows]
        return e2m1_blocks(fmt, rows_of(codes, first, last), rows_of(factors, first, last), scale)

    return parts.make(fmt, (*outer, rows, 2 * half), make, "NVFP4, groups of 16")


def mxfp4(parts: Parts, codes_end: str, scales_end: str) -> StoredTensor:
    """Codes (..., rows, cols / 32, 16) or (..., rows, cols / 2), exponents (..., rows, cols / 32)
    with a bias of 127."""
    codes = parts.take(codes_end, ("U8",))
    if len(codes.shape) < 2:
        raise parts.refuse(f"is MXFP4 and has {len(codes.shape)} dimensions")
    shape = (*codes.shape[:-2], 16 * codes.shape[-2]) if codes_end == "blocks" else codes.shape
    if len(shape) < 2 or shape[-1] % 16 or (codes_end == "blocks" and codes.shape[-1] != 16):
        raise parts.refuse(f"is MXFP4 of shape {codes.shape}")
    *outer, half = shape
    exponents = parts.take(scales_end, ("U8", "F8_E8M0"), (*outer, half // 16))
    per_row = half // codes.shape[-1]

    def make(first: int, last: int) -> Bytes:
        pairs = rows_of(codes, first * per_row, last * per_row).reshape(last - first, half)
        return mxfp4_blocks(pairs, rows_of(exponents, first, last))

    return parts.make(FORMATS["MXFP4"], (*outer, 2 * half), make, "MXFP4, groups of 32")
