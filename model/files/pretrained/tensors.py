"""Tensors of a description made of a folder's stored tensors, with ggml's types.

Matrices are read row by row when needed, as stored or quantised on the way; vectors become F32.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, SafetensorsError, UnsupportedError
from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.places import Place
from urdir.model.files.pretrained.rows import GGML_TYPES, Rows, row_bytes
from urdir.model.files.quantised import quantised_type
from urdir.model.files.safetensors import ITEM_NBYTES, StoredTensor
from urdir.model.files.tensor_types import TENSOR_TYPES, type_number

#: Tensors that become F32: vectors in the description, whatever their stored rank, and routers.
_F32 = re.compile(
    r"_norm\.weight$|\.bias$|\.ffn_gate_inp\.weight$|\.ssm_(a|d|conv1d\w*)(\.weight)?$"
    r"|\.shortconv\.conv\.weight$|\.ffn_norm$|attn_sinks\.weight$|\.scale$|layer_output_scale"
)


def make_tensors(
    places: Mapping[str, Place],
    stored: Mapping[str, StoredTensor],
    keys: Mapping[str, Value],
    *,
    quantize: str | None,
    path: Path,
) -> dict[str, Tensor]:
    """The tensors by name. Matrices get the type ``quantize`` (None: as stored).

    Raises UnsupportedError for an unsupported dtype, SafetensorsError or ConfigError for
    inconsistent tensors.
    """
    wanted = None if quantize is None else quantised_type(quantize)
    kept: list[str] = []
    tensors = {}
    for name, place in places.items():
        parts = _alike([stored[part] for part in place.parts], path)
        tensors[name] = _tensor(name, parts, place, keys, wanted, kept, path)
    if kept:
        warnings.warn(
            f"{path}: {len(kept)} tensors keep their type, since their rows are not a multiple of "
            f"{quantize}'s block: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}",
            stacklevel=2,
        )
    return tensors


def vector(name: str, values: NDArray[Any]) -> Tensor:
    """An F32 tensor of values."""
    array = np.ascontiguousarray(values, np.float32)
    data = array.reshape(-1).view(np.uint8)
    data.flags.writeable = False
    return Tensor(name, GGML_TYPES["F32"], array.shape, 0, data.nbytes, data)


def _alike(parts: list[StoredTensor], path: Path) -> tuple[StoredTensor, ...]:
    """Tensors checked to have one supported type and one shape."""
    first = parts[0]
    for tensor in parts:
        if tensor.dtype in ITEM_NBYTES and tensor.dtype not in GGML_TYPES:
            raise UnsupportedError(
                f"{path}: tensor '{tensor.name}' has dtype {tensor.dtype}; supported: "
                f"{', '.join(GGML_TYPES)}"
            )
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise SafetensorsError(
                f"{path}: tensor '{tensor.name}' is {tensor.dtype} {tensor.shape}, '{first.name}' "
                f"{first.dtype} {first.shape}"
            )
    return tuple(parts)


def _tensor(
    name: str,
    parts: tuple[StoredTensor, ...],
    place: Place,
    keys: Mapping[str, Value],
    wanted: int | None,
    kept: list[str],
    path: Path,
) -> Tensor:
    layout, shape = place.layout, parts[0].shape
    transposed = layout.transposed and parts[0].dtype in GGML_TYPES  # rows of blocks are outputs
    if transposed:
        if len(shape) < 2:
            raise SafetensorsError(f"{path}: tensor '{parts[0].name}' {shape} is not a matrix")
        shape = (*shape[:-2], shape[-1], shape[-2])
    rows = Rows(parts, transposed=transposed)
    of_vector = len(shape) < 2
    order = None
    if layout.rows is not None:
        order = _order(layout.rows, keys, shape[0] if of_vector else rows.rows_each, path, name)
    stacked = shape if len(parts) == 1 else (len(parts), *shape)
    if of_vector or _F32.search(name) or layout.values or layout.factors:
        values = rows.values().reshape(stacked)
        if order is not None:
            values = values.reshape(-1, 1 if of_vector else shape[-1])[order]
            values = values.reshape(-1) if of_vector else values
        if layout.factors is not None:
            factors = layout.factors(keys)
            if len(factors) != len(values):
                raise ConfigError(f"{path}: tensor '{parts[0].name}' has {len(values)} rows")
            values = values * factors.reshape(-1, *[1] * (values.ndim - 1))
        if layout.values is not None:
            values = layout.values(values)
        return vector(name, _shaped(values, layout.shape, parts[0], path))
    if order is not None:
        rows = Rows(parts, order, transposed)
        stacked = (len(order), shape[-1]) if len(order) != rows.rows_each else stacked
    type_id = type_number(rows.dtype)
    if wanted is not None:
        if rows.width % TENSOR_TYPES[wanted].block:
            kept.append(name)
        else:
            type_id = wanted
    data = row_bytes(rows, type_id)
    if layout.shape is not None:
        stacked = _new_shape(stacked, layout.shape, parts[0], path)
    return Tensor(name, type_id, stacked, 0, len(data), data)


def _order(
    rows: Any, keys: Mapping[str, Value], count: int, path: Path, name: str
) -> NDArray[np.intp]:
    """The order of rows; ConfigError where it does not fit the tensor."""
    try:
        order: NDArray[np.intp] = rows(keys, count)
    except (KeyError, ValueError, ZeroDivisionError, TypeError) as error:
        raise ConfigError(f"{path}: {name}: {count} rows do not fit the sizes: {error}") from None
    if len(order) and not 0 <= order.min() <= order.max() < count:
        raise ConfigError(f"{path}: {name}: {count} rows do not fit the sizes")
    return order


def _shaped(
    values: NDArray[Any], shape: tuple[int, ...] | None, part: StoredTensor, path: Path
) -> NDArray[Any]:
    if shape is None:
        return values
    return values.reshape(_new_shape(values.shape, shape, part, path))


def _new_shape(
    shape: tuple[int, ...], wanted: tuple[int, ...], part: StoredTensor, path: Path
) -> tuple[int, ...]:
    try:
        return np.broadcast_to(np.uint8(0), shape).reshape(wanted).shape
    except ValueError:
        raise SafetensorsError(f"{path}: tensor '{part.name}' is {part.shape}") from None
