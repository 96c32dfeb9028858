"""Tensors of a description made of a folder's stored tensors, with ggml's types.

Matrices are read row by row when needed, as stored or quantised on the way; vectors become F32.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, SafetensorsError, UnsupportedError
from urdir.model.files.metadata import Value
from urdir.model.files.model_file import SHARED_ORDERS
from urdir.model.files.open_file import FileBytes
from urdir.model.files.opened import Tensor
from urdir.model.files.pretrained.layouts import Layout
from urdir.model.files.pretrained.places import Place
from urdir.model.files.pretrained.rows import GGML_TYPES, RowBytes, Rows, row_bytes
from urdir.model.files.quantised import Recipe
from urdir.model.files.safetensors import ITEM_NBYTES, StoredTensor
from urdir.model.files.tensor_types import type_number

#: Tensors that become F32: vectors in the description, whatever their stored rank, and routers.
_F32 = re.compile(
    r"_norm\.weight$|\.bias$|\.ffn_gate_inp\.weight$|\.ssm_(a|d|conv1d\w*)(\.weight)?$"
    r"|(^|\.)(output_)?hc_\w+\.weight$|_compressor_ape\.weight$"
    r"|\.xielu\.|\.shortconv\.conv\.weight$|\.ffn_norm$|attn_sinks\.weight$|\.scale$|layer_output_scale"
    r"|attn_rel_b\.weight$|\.altup_(router|\w+_coef)\.weight$"
    r"|\.ple_conv1d\.weight$"
)


#: Tables of integers, which become F32, and the types of these.
_INTEGERS = re.compile(r"\.ffn_gate_tid2eid\.weight$")
_INTEGER_TYPES = {"I64": "<i8", "I32": "<i4"}


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
    wanted = None
    if quantize is not None:
        layers = keys.get("block_count")
        assert isinstance(layers, int)
        wanted = Recipe(quantize, layers, "output.weight" not in places)
    kept: list[str] = []
    tensors = {}
    orders: dict[str, NDArray[np.intp]] = {}
    for name, place in places.items():
        if _INTEGERS.search(name):
            tensors[name] = _integers(name, stored[place.parts[0]], path)
            continue
        parts = _alike([stored[part] for part in place.parts], path)
        tensors[name] = tensor = _tensor(name, parts, place.layout, keys, wanted, path)
        is_matrix = isinstance(tensor.data, RowBytes | FileBytes)
        if any(part.order is not None for part in parts):
            order = _column_order(name, parts, path)
            if is_matrix:
                orders[name.removesuffix(".weight")] = order
            else:
                tensors[name] = vector(name, _in_own_order(tensor, order))
        if wanted and is_matrix and wanted.type_of(name, tensor.shape[-1]) is None:
            kept.append(name)
    if kept:
        warnings.warn(
            f"{path}: {len(kept)} tensors keep their type, since their rows are not a multiple of "
            f"{quantize}'s block: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}",
            stacklevel=2,
        )
    return tensors | {name: vector(name, order) for name, order in _shared(orders, tensors).items()}


def _column_order(name: str, parts: tuple[StoredTensor, ...], path: Path) -> NDArray[np.intp]:
    """The order of a matrix's columns, (cols,), or those of experts, (experts, cols)."""
    orders = [np.arange(of.shape[-1]) if of.order is None else of.order for of in parts]
    if name.endswith("exps.weight"):
        return np.stack(orders)
    if len(parts) > 1:
        raise UnsupportedError(
            f"{path}: tensor '{parts[0].name}' has columns in an order of its own (desc_act), as a "
            "part of another tensor"
        )
    return orders[0]


def _in_own_order(tensor: Tensor, order: NDArray[np.intp]) -> NDArray[np.float32]:
    """The values of an F32 tensor, whose columns are in an order, where they belong."""
    values = tensor.data[:].view(np.float32).reshape(tensor.shape)
    found = np.empty_like(values)
    found[..., order] = values
    return found


def _shared(
    orders: Mapping[str, NDArray[np.intp]], names: Collection[str]
) -> dict[str, NDArray[np.intp]]:
    """The orders of matrices by their tensors' names: under one name if they are those of all
    matrices that multiply the same x (`SHARED_ORDERS`)."""
    found = {}
    for base, order in orders.items():
        layer, _, name = base.rpartition(".")
        group = SHARED_ORDERS.get(name)
        alike = [f"{layer}.{of}" for of, to in SHARED_ORDERS.items() if to == group]
        alike = [of for of in alike if f"{of}.weight" in names]
        shares = group is not None and all(
            of in orders and np.array_equal(orders[of], order) for of in alike
        )
        found[f"{layer}.{group if shares else name}.order"] = order
    return found


def vector(name: str, values: NDArray[Any]) -> Tensor:
    """An F32 tensor of values."""
    array = np.ascontiguousarray(values, np.float32)
    data = array.reshape(-1).view(np.uint8)
    data.flags.writeable = False
    return Tensor(name, GGML_TYPES["F32"], array.shape, 0, data.nbytes, data)


def _integers(name: str, part: StoredTensor, path: Path) -> Tensor:
    """A table of integers as an F32 tensor."""
    if part.dtype not in _INTEGER_TYPES:
        raise UnsupportedError(
            f"{path}: tensor '{part.name}' has dtype {part.dtype}; supported: "
            f"{', '.join(_INTEGER_TYPES)}"
        )
    raw = np.ascontiguousarray(part.data[:]).reshape(-1).view(_INTEGER_TYPES[part.dtype])
    return vector(name, raw.reshape(part.shape))


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
    layout: Layout,
    keys: Mapping[str, Value],
    wanted: Recipe | None,
    path: Path,
) -> Tensor:
    if layout.shape is not None:
        with _fitting(name, "its shape does", path):
            stored_as = layout.shape(keys)
        parts = tuple(_shaped(part, stored_as, path) for part in parts)
    shape = parts[0].shape
    turns = layout.transposed
    with _fitting(name, f"{shape} does", path):
        turned = turns if isinstance(turns, bool) else turns(keys, shape)
    is_float = parts[0].dtype in GGML_TYPES and not parts[0].is_decoded
    transposed = turned and is_float  # rows of quantised matrices are outputs
    if transposed:
        if len(shape) < 2:
            raise SafetensorsError(f"{path}: tensor '{parts[0].name}' {shape} is not a matrix")
        shape = (*shape[:-2], shape[-1], shape[-2])
    rows = Rows(parts, transposed=transposed)
    if layout.rows is not None:
        order = _of_rows(layout.rows, keys, rows.rows_each, path, name)
        if len(order) != rows.rows_each:  # some of the rows
            shape = (len(order), shape[-1])
        rows = Rows(parts, order, transposed)
    if len(parts) > 1:
        shape = _shape_together(len(parts), shape, layout)
    if len(shape) < 2 or _F32.search(name) or _is_changed(layout):
        return vector(name, _values(rows, layout, keys, path, name).reshape(shape))
    type_id = type_number(rows.dtype)
    if wanted is not None and (made := wanted.type_of(name, rows.width)) is not None:
        type_id = made
    data = row_bytes(rows, type_id)
    return Tensor(name, type_id, shape, 0, len(data), data)


def _shape_together(parts: int, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    return (parts * shape[0], *shape[1:]) if layout.joined else (parts, *shape)


def _is_changed(layout: Layout) -> bool:
    return any(of is not None for of in (layout.values, layout.factors, layout.scale))


def _values(
    rows: Rows, layout: Layout, keys: Mapping[str, Value], path: Path, name: str
) -> NDArray[np.float32]:
    """Changed values of a small tensor, (rows, width) f32."""
    values = rows.values()
    if layout.factors is not None:
        values = values * _of_rows(layout.factors, keys, len(values), path, name)[:, None]
    if layout.scale is not None:
        values = values * np.float32(layout.scale(keys, rows.width))
    return values if layout.values is None else layout.values(values)


def _of_rows(
    made: Callable[[Mapping[str, Value], int], NDArray[Any]],
    keys: Mapping[str, Value],
    count: int,
    path: Path,
    name: str,
) -> NDArray[Any]:
    """The order or the factors of rows; ConfigError where sizes do not fit the tensor."""
    with _fitting(name, f"{count} rows do", path):
        return made(keys, count)


@contextmanager
def _fitting(name: str, what: str, path: Path) -> Iterator[None]:
    """ConfigError where sizes of the configuration are missing or do not fit a tensor."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{path}: {name}: {what} not fit: no size {error} is given") from None
    except (ValueError, ArithmeticError, TypeError) as error:
        raise ConfigError(f"{path}: {name}: {what} not fit the sizes: {error}") from None


def _shaped(part: StoredTensor, shape: tuple[int, ...], path: Path) -> StoredTensor:
    """The tensor with another shape of as many elements."""
    count, known = math.prod(part.shape), math.prod(size for size in shape if size != -1)
    if min(shape, default=0) < -1 or shape.count(-1) > 1:
        raise ConfigError(f"{path}: tensor '{part.name}' has no shape {shape}: wrong sizes")
    keeps_rows = part.dtype in ITEM_NBYTES or shape[-1] == part.shape[-1]
    if known < 1 or count % known or (-1 not in shape and count != known) or not keeps_rows:
        raise SafetensorsError(f"{path}: tensor '{part.name}' is {part.shape}, expected {shape}")
    return replace(part, shape=tuple(count // known if size == -1 else size for size in shape))
