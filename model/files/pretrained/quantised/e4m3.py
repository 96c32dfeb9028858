"""FP8: floats of eight bits (E4M3) with scales of blocks, rows or the whole matrix."""

from __future__ import annotations

import math

import numpy as np

from urdir.model.files.pretrained.quantised.blocks import Bytes, e4m3_blocks, e4m3_type
from urdir.model.files.pretrained.quantised.parts import SCALES, Parts, floats, rows_of
from urdir.model.files.pretrained.quantised.scheme import Scheme
from urdir.model.files.safetensors import StoredTensor
from urdir.ptxgen.spec import ceil_div


def matrix(parts: Parts, scheme: Scheme) -> StoredTensor:
    """N (..., rows, cols) F8_E4M3, times N_scale_inv or N_scale: (..., rows / block rows, cols /
    block cols), or (..., rows, 1), or one for each leading dimension or for all.

    A scale's name says that it is inverse, and it is not.
    """
    quants = parts.take("", ("F8_E4M3",))
    if len(quants.shape) < 2:
        raise parts.refuse(f"is FP8 and has {len(quants.shape)} dimensions")
    *outer, rows, cols = quants.shape
    end, matrices = "scale_inv" if parts.has("scale_inv") else "scale", math.prod(outer)
    fmt = e4m3_type(cols, scheme.block[1] if scheme.block else None)
    if fmt is None:
        raise parts.refuse(f"is FP8 and has {cols} columns, expected a multiple of 32")
    if scheme.block:
        height, width = scheme.block
        shape = (*outer, ceil_div(rows, height), ceil_div(cols, width))
        stored = floats(parts.take(end, SCALES, shape)).reshape(matrices, *shape[-2:])
        scales = stored[..., np.arange(cols // fmt.block) * fmt.block // width]
        scaled = f"blocks of {height} x {width}"
    else:
        each = [(*outer, rows, 1), (*outer, rows), (*outer, 1, 1), (*outer, 1), tuple(outer), (1,)]
        stored = floats(parts.take(end, SCALES, *each)).reshape(-1)
        scales = np.broadcast_to(stored, (matrices,)) if stored.size == 1 else stored
        scales = scales.reshape(matrices, -1, 1)
        height = rows // scales.shape[1]
        scaled = "rows" if height == 1 else "the matrix"
        scales = np.broadcast_to(scales, (*scales.shape[:2], cols // fmt.block))

    def make(first: int, last: int) -> Bytes:
        numbers = np.arange(first, last)
        of_rows = scales[numbers // rows, numbers % rows // height]
        return e4m3_blocks(fmt, rows_of(quants, first, last), of_rows)

    return parts.make(fmt, quants.shape, make, f"FP8, scales of {scaled}")
