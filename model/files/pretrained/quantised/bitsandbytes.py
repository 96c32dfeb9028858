"""bitsandbytes: codes of four bits with a table of values (NF4, FP4), integers of eight bits.

Sources: bitsandbytes' ``QuantState.as_dict`` and ``dequantize_4bit`` (functional.py); QLoRA, arXiv
2305.14314.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np

from urdir.model.errors import SafetensorsError
from urdir.model.files.json_text import parse_json
from urdir.model.files.limits import SAFETENSORS_DIMS
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.quantised.blocks import code_blocks, code_type
from urdir.model.files.pretrained.quantised.integers import rows_of_eight
from urdir.model.files.pretrained.quantised.parts import Bytes, Floats, Parts, floats
from urdir.model.files.safetensors import StoredTensor
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.formats import CODE_VALUES, FORMATS

#: Ends of the names of matrices of four bits' states.
STATES = tuple(f".quant_state.bitsandbytes__{kind.lower()}" for kind in CODE_VALUES)
#: The types in which codes may be stored, two in a byte.
_STORAGE = ("U8", "BF16", "F16", "F32")

#: Weights that share a scale: the writer's own blocks have up to 4096.
_MOST_BLOCK = 1 << 16
#: How far values of a table may be from those of its kind: they are written by several programs.
_NEAR = 1e-6


@dataclass(frozen=True, slots=True)
class _State:
    """The ``kind`` ("NF4", "FP4") and shape of a matrix, and how many weights, and how many of
    their scales, share a scale; ``offset`` of the scales."""

    kind: str
    shape: tuple[int, ...]
    block: int
    nested_block: int
    offset: float


def matrix(parts: Parts) -> StoredTensor | None:
    """The matrix, if bitsandbytes has written it."""
    if any(parts.module_has(f"weight{end}") for end in STATES):
        return _fours(parts)
    return _eights(parts) if parts.module_has("SCB") else None


def _fours(parts: Parts) -> StoredTensor:
    """N: codes, the first in the upper half of a byte; N.quant_map: their 16 values; N.absmax: a
    scale for each block of codes. With N.nested_absmax and N.nested_quant_map scales are codes of
    eight bits themselves, plus an offset. N.quant_state has sizes.

    Rows that no type fits, and those of another table, are made F32, exactly.
    """
    state = _state(parts)
    count = math.prod(state.shape)
    codes = parts.take("", _STORAGE)
    if len(codes.data) != ceil_div(count, 2):
        raise parts.refuse(f"has {len(codes.data)} bytes for {count} codes of four bits")
    table = floats(parts.take_of_module("weight.quant_map", ("F32",), (16,)))
    blocks = ceil_div(count, state.block)
    nested = parts.module_has("weight.nested_absmax")
    stored = parts.take_of_module("weight.absmax", ("U8" if nested else "F32",), (blocks,))
    if nested:
        values = floats(parts.take_of_module("weight.nested_quant_map", ("F32",), (256,)))
        outer = (ceil_div(blocks, state.nested_block),)
        factors = floats(parts.take_of_module("weight.nested_absmax", ("F32",), outer))

    def scales(begin: int, end: int) -> Floats:
        """Those of some blocks."""
        if not nested:
            raw = np.ascontiguousarray(stored.data[4 * begin : 4 * end])
            return raw.view("<f4").astype(np.float32)
        each = factors[np.arange(begin, end) // state.nested_block]
        found: Floats = values[stored.data[begin:end]] * each + np.float32(state.offset)
        return found

    cols, block = state.shape[-1], state.block
    fmt = code_type(state.kind, cols, block)
    quants = f"{state.kind}, groups of {block}{' with quantised scales' if nested else ''}"
    if fmt is not None and np.all(np.abs(table - CODE_VALUES[state.kind]) <= _NEAR):

        def packed(first: int, last: int) -> Bytes:
            read = codes.data[first * cols // 2 : last * cols // 2].reshape(last - first, -1)
            of_groups = np.arange(first * cols, last * cols, fmt.block) // block
            begin = int(of_groups[0])
            each = scales(begin, int(of_groups[-1]) + 1)[of_groups - begin]
            lower_first: Bytes = read >> np.uint8(4) | read << np.uint8(4)
            return code_blocks(fmt, lower_first, each.reshape(last - first, -1))

        return parts.make(fmt, state.shape, packed, quants)
    pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)  # of each byte

    def make(first: int, last: int) -> Bytes:
        begin, end = first * cols // block, ceil_div(last * cols, block)  # whole blocks
        read = codes.data[begin * block // 2 : end * block // 2]
        found = np.take(pairs, np.pad(read, (0, (end - begin) * block // 2 - len(read))), axis=0)
        made: Floats = found.reshape(-1, block)
        made *= scales(begin, end)[:, None]
        skipped = first * cols - begin * block
        of_rows = made.reshape(-1)[skipped : skipped + (last - first) * cols]
        return of_rows.reshape(last - first, cols).view(np.uint8)

    return replace(parts.make(FORMATS["F32"], state.shape, make, quants), is_decoded=True)


def _eights(parts: Parts) -> StoredTensor:
    """N (rows, cols) I8, and SCB (rows,) of its module: 127 times the scale of a row. Which inputs
    its own kernels multiply as floats is a matter of activations, which stay floats here."""
    stored = parts.take("", ("I8",), (None, None))
    scales = parts.take_of_module("SCB", ("F32",), (stored.shape[0],))
    if parts.module_has("weight_format"):  # the order for one kind of GPUs: files have rows
        form = parts.take_of_module("weight_format", ("U8",))
        if np.any(form.data[: len(form.data)]):
            raise parts.refuse("is not stored row by row (weight_format)")
    exact = floats(scales)[:, None] / np.float32(127)
    if not np.all(np.abs(exact) <= np.finfo(np.float16).max):  # NaN is not, either
        raise parts.refuse("has scales of rows (SCB) that no f16 holds")
    rounded = exact.astype(np.float16).astype(np.float32)
    if np.any(rounded != exact):  # one text for all matrices: it is shown once
        warnings.warn(f"{parts.path}: scales of rows (SCB) are rounded to f16", stacklevel=2)
    return rows_of_eight(parts, stored, rounded)


def _state(parts: Parts) -> _State:
    kinds = zip(CODE_VALUES, (f"weight{end}" for end in STATES), strict=True)
    kind, name = next((kind, name) for kind, name in kinds if parts.module_has(name))
    tensor = parts.take_of_module(name, ("U8",), (None,))
    what = f"{parts.path}: tensor '{tensor.name}'"
    found = parse_json(bytes(tensor.data[: len(tensor.data)]), what, SafetensorsError)
    shape, offset = found.get("shape"), found.get("nested_offset", 0.0)
    blocks = [found.get("blocksize"), found.get("nested_blocksize", 256)]
    dims = shape if isinstance(shape, list) else []
    sizes = [*dims, *blocks] if 1 < len(dims) <= SAFETENSORS_DIMS.most else []
    fits = all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
    if not sizes or not fits or sizes[-2] % 2 or sizes[-2] > _MOST_BLOCK:
        raise SafetensorsError(f"{what} has shape {shown(shape)}, blocks of {shown(blocks)}")
    if type(offset) is not float or not abs(offset) <= float(np.finfo(np.float32).max):
        raise SafetensorsError(f"{what} has nested_offset {shown(offset)}")
    return _State(kind, tuple(sizes[:-2]), sizes[-2], sizes[-1], offset)
