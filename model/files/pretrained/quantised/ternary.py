"""BitNet: weights -1, 0 and 1 with a scale of the matrix, packed, or made of floats while loading.

Source: transformers' ``integrations/bitnet.py`` (BitLinear, AutoBitLinear). Both round activations
to eight bits, which stay floats here.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable

import numpy as np

from urdir.model.files.pretrained.quantised.blocks import (
    Bytes,
    integer_blocks,
    integer_type,
    pack_bits,
    ternary_blocks,
)
from urdir.model.files.pretrained.quantised.parts import SCALES, Parts, floats, floats_of, rows_of
from urdir.model.files.pretrained.quantised.scheme import Scheme
from urdir.model.files.pretrained.rows import GGML_TYPES
from urdir.model.files.safetensors import StoredTensor
from urdir.ptxgen.weights.formats import FORMATS

_IN_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
#: The least mean size of weights, by which they are divided.
_LEAST = 1e-5
#: Blocks may have twice a scale, as f16 (`integer_blocks`).
_MOST = float(np.finfo(np.float16).max) / 2
#: Rows whose sizes are added at a time.
_ROWS = 256


def packed(parts: Parts, scheme: Scheme) -> StoredTensor:
    """N (rows / 4, cols) U8: rows n, n + rows / 4, ... in two bits each, lowest first, plus 1;
    N_scale of the matrix, by which BitLinear divides and AutoBitLinear multiplies."""
    codes = parts.take("", ("U8",), (None, None))
    quarter, cols = codes.shape
    stored = float(floats(parts.take("scale", SCALES, (1,), ())).reshape(()))
    if not stored:
        raise parts.refuse("has a scale of 0")
    scale = 1 / stored if scheme.divides else stored

    def quants(first: int, last: int) -> Bytes:
        found = []
        for number in range(first // quarter, (last - 1) // quarter + 1):
            begin, end = max(first, number * quarter), min(last, (number + 1) * quarter)
            of = rows_of(codes, begin - number * quarter, end - number * quarter)
            found.append(of >> np.uint8(2 * number) & 3)
        return np.concatenate(found)

    return _made(parts, (4 * quarter, cols), quants, lambda: scale)


def is_rounded(tensor: StoredTensor, scheme: Scheme) -> bool:
    """Whether a matrix of floats is one that the model rounds in every pass ("online")."""
    if scheme.unrounded is None or len(tensor.shape) != 2 or not _IN_LAYER.search(tensor.name):
        return False
    module = tensor.name.removesuffix(".weight")
    return not any(module.startswith(of) or module.endswith(of) for of in scheme.unrounded)


def rounded(parts: Parts) -> StoredTensor:
    """N (rows, cols), floats: divided by their mean size and rounded to -1, 0 and 1."""
    stored = parts.take("", tuple(GGML_TYPES), (None, None))
    if not parts.base.endswith("_proj.weight"):
        raise parts.refuse("is not known to be rounded (quantization_mode 'online') or not to be")
    rows, cols = stored.shape

    @functools.cache
    def mean() -> float:
        chunks = (floats_of(stored, at, min(rows, at + _ROWS)) for at in range(0, rows, _ROWS))
        total = sum(float(np.abs(of).sum(dtype=np.float64)) for of in chunks)
        return max(float(np.float32(total / (rows * cols))), _LEAST)

    def quants(first: int, last: int) -> Bytes:
        signs = np.rint(floats_of(stored, first, last) * np.float32(1 / mean()))
        codes: Bytes = (np.clip(signs, -1, 1) + 1).astype(np.uint8)
        return codes

    return _made(parts, (rows, cols), quants, mean)


def _made(
    parts: Parts,
    shape: tuple[int, int],
    quants: Callable[[int, int], Bytes],
    scale: Callable[[], float],
) -> StoredTensor:
    """The matrix of ``quants``, 0 to 3 for -1 to 2 (rows, cols) of some rows, times ``scale``."""
    cols = shape[1]
    fmt = FORMATS["TQ2_0"] if cols % 256 == 0 else integer_type(2, cols, cols)
    if fmt is None:
        raise parts.refuse(f"is ternary and has {cols} columns, expected a multiple of 32")

    @functools.cache
    def checked() -> float:
        exact = scale()
        if not abs(exact) <= _MOST:  # NaN is not, either
            raise parts.refuse("has a scale beyond f16")
        if float(np.float16(exact)) != exact:  # one text: it is shown once
            warnings.warn(f"{parts.path}: scales of matrices are rounded to f16", stacklevel=2)
        return exact

    def make(first: int, last: int) -> Bytes:
        d = checked()
        codes = quants(first, last)
        if fmt.name == "TQ2_0":
            return ternary_blocks(codes, d)
        factors = np.full((len(codes), cols // fmt.block), d, np.float32)
        return integer_blocks(
            fmt, 2, pack_bits(codes, 2), factors, np.ones(factors.shape, np.uint8)
        )

    return parts.make(fmt, shape, make, "-1, 0 and 1, a scale of the matrix")
